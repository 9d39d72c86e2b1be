"""Where tests run.

``--device cpu``, the default, runs all test files. The others, which README.md describes, run those
that say so, and do not import the rest. A file that does not say where it runs is an error.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest

# Threads that wait sleep, here and in processes that tests start: others may be using the cores.
# It is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Else every process in which Inductor generates code compiles and runs programs to find out which
# of the processor's vector instructions the compiler knows. Read with torch, too.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import torch
from cpu_time import CpuTime
from declared_device import HOW_TO_SAY, declared_kind
from ranks import Ranks

STARTED = time.monotonic()

hypothesis.settings.register_profile(
    "any time", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)


def load_hypothesis_profile() -> None:
    """Without limits of time: how long an example takes says nothing on a busy machine."""
    hypothesis.settings.load_profile("any time")


def pytest_collectstart() -> None:
    load_hypothesis_profile()  # torch.testing loads one of its own when it is imported


def pytest_runtest_setup(item: pytest.Item) -> None:
    seconds = item.config.getoption("--skip-after")
    if time.monotonic() - STARTED > seconds:
        pytest.skip(f"left to make test-long: {seconds:g} seconds are over")
    load_hypothesis_profile()
    torch.default_generator.manual_seed(0)  # what tests draw does not depend on those before


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda", "emulated", "marked"), default="cpu")
    parser.addoption(
        "--first-and-last",
        action="store_true",
        help="of the cases of a test, only these two, which differ in every parameter",
    )
    parser.addoption(
        "--cpu-limit",
        type=float,
        default=0.0,
        help="CPU seconds of a test without the marker long; 0: no limit",
    )
    parser.addoption(
        "--twice",
        action="store_true",
        help="run each test a second time, as one above --cpu-limit is: it must pass again",
    )
    parser.addoption(
        "--skip-after",
        type=float,
        default=float("inf"),
        help="seconds after the start from which on tests are skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    # What a shell without job control starts in the background ignores Ctrl-C, and so do its
    # children. Tests press it, in this process and in others.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(CpuTime(config))
    if config.getoption("--device") == "marked":
        from marked_device import marked_device

        # from now on, because test files make tensors when they are imported
        marked = marked_device()
        marked.__enter__()
        config.add_cleanup(lambda: marked.__exit__(None, None, None))
    if config.getoption("--device") != "cuda":
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch finds no CUDA device")
    torch.set_default_device("cuda")


class _SaysNothing(pytest.File):
    """A test file that does not say where it runs, and might be left out for ever."""

    def collect(self) -> Iterator[pytest.Item]:
        raise self.CollectError(f"{self.path.name} {HOW_TO_SAY}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files that say nothing about the device; they are not even imported."""
    device = config.getoption("--device")
    if device == "cpu" or not is_test_file(collection_path):
        return None
    kind = declared_kind(collection_path)
    return True if kind == "cpu_only" or (kind == "own_device" and device == "marked") else None


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    if declared_kind(module_path) is not None:
        return None
    return _SaysNothing.from_parent(parent, path=module_path)


def pytest_itemcollected(item: pytest.Item) -> None:
    case = item.name.partition("[")[2].removesuffix("]")
    if any(case in marker.args for marker in item.iter_markers("long_cases")):
        item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Take what imports have made out of garbage collection, which many tests ask for."""
    gc.collect()
    gc.freeze()


def is_test_file(path: Path) -> bool:
    return path.suffix == ".py" and path.name.startswith("test_")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.getoption("--device")
    for item in items:
        needs_gpu = item.get_closest_marker("cuda") is not None
        if needs_gpu and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))
        elif device != "cpu" and not needs_gpu and item.get_closest_marker("any_device") is None:
            item.add_marker(pytest.mark.skip(reason=f"says nothing about --device {device}"))
        elif device in ("emulated", "marked") and item.get_closest_marker("traced") is not None:
            item.add_marker(pytest.mark.skip(reason=f"nothing is compiled on --device {device}"))
    if config.getoption("--first-and-last"):
        cases: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("skip") is None:
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        left_out = {item for of_test in cases.values() for item in of_test[1:-1]}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def device_of_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --device emulated, runs a test's ops as CUDA kernels on the CPU.

    With --device cuda, the end of a step knows what the GPU found in it, and so does a test's end,
    but for the marker cuda.
    """
    device = request.config.getoption("--device")
    if device == "emulated":
        from emulated_groups import emulated_cuda

        with emulated_cuda():
            yield
    elif device == "cuda" and request.node.get_closest_marker("cuda") is None:
        from torch_dynemb.storage.cuda import CudaMemory

        end_step = CudaMemory.end_step

        def waits(*arguments: Any) -> None:
            free = not torch.cuda.is_current_stream_capturing()
            if free:
                torch.cuda.synchronize()
            end_step(*arguments)
            if free:
                torch.cuda.synchronize()

        with patch.object(CudaMemory, "end_step", waits):
            yield
        torch.cuda.synchronize()
        torch.ops.dynemb.raise_device_errors(torch.cuda.current_device())
    else:
        yield


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Two nodes of two ranks."""
    ranks = Ranks(4, local_size=2)
    yield ranks
    ranks.stop()
