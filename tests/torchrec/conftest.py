"""Process groups for tests of the TorchRec integration."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from ranks import Ranks

# not find_spec("torchrec"), which finds this directory
if importlib.util.find_spec("torch_dynemb") is None:
    pytest.skip("x", allow_module_level=True)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Two nodes of two ranks."""
    ranks = Ranks(4, local_size=2)
    yield ranks
    ranks.stop()
