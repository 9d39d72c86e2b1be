"""Fixtures of tests about signals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from interrupting import ctrl_c_raises


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    with ctrl_c_raises():
        yield
