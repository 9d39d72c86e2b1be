"""Fixtures of tests of tutorials."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def same_threads_afterwards() -> Iterator[None]:
    """A job sets torch's number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
