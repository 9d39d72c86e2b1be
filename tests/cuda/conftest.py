"""Fixtures of tests that run CUDA kernels on an emulated GPU, or on a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulator.mode import set_capturing, set_seed


@pytest.fixture(params=["emulated", pytest.param("real", marks=pytest.mark.cuda)])
def gpu(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[0, 1, 2], ids="seed {}".format)
def seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """Orders in which the emulator runs threads and blocks."""
    set_seed(request.param)
    yield request.param
    set_seed(0)


@pytest.fixture
def order_of_threads() -> Iterator[None]:
    """One in which the emulator does not run threads one after another."""
    set_seed(5)
    yield
    set_seed(0)
    set_capturing(False)
