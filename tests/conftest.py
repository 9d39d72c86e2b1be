"""Where tests run: ``--device cpu`` (the default), ``cuda``, or ``emulated`` (tests/emulator)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import Ranks

# Tests of the library that say nothing about the device; with --device cuda or emulated these run.
ANY_DEVICE = {
    "test_admission",
    "test_collections",
    "test_compaction",
    "test_eviction",
    "test_freeze",
    "test_index",
    "test_index_growth",
    "test_index_sequences",
    "test_initializers",
    "test_known_faults",
    "test_life_cycle",
    "test_long_life",
    "test_lookup",
    "test_module_optimizer",
    "test_module_training",
    "test_modules",
    "test_optimizer_options",
    "test_optimizers",
    "test_row_dtypes",
    "test_split",
    "test_state",
    "test_state_refused",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda", "emulated"), default="cpu")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != "cuda":
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch finds no CUDA device")
    torch.set_default_device("cuda")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files that say nothing about the device."""
    if config.getoption("--device") == "cpu" or collection_path.suffix != ".py":
        return None
    name = collection_path.stem
    if name.startswith("test_") and name not in ANY_DEVICE and not name.startswith("test_cuda_"):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.getoption("--device")
    for item in items:
        needs_gpu = item.get_closest_marker("cuda") is not None
        if needs_gpu and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))
        elif device != "cpu" and not needs_gpu and item.path.stem not in ANY_DEVICE:
            item.add_marker(pytest.mark.skip(reason=f"says nothing about --device {device}"))
        elif device == "emulated" and item.get_closest_marker("traced") is not None:
            item.add_marker(pytest.mark.skip(reason="the emulator has no fake implementations"))


@pytest.fixture(autouse=True)
def device_of_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --device emulated, runs a test's ops as CUDA kernels on the CPU."""
    if request.config.getoption("--device") != "emulated":
        yield
        return
    from emulated_groups import emulated_cuda

    with emulated_cuda():
        yield

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
