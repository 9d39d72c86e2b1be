"""Every op with damaged arguments works, or raises: tests/tools/fuzz_ops.py.

The process never ends, and with the sanitizers of the compiler no call reads or writes beyond a
tensor, or overflows.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.cpu_only("test_cuda_kernels compares a GPU with it")

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    monkeypatch.syspath_prepend(str(TOOLS))
    import fuzz_ops
    import sanitized

    yield fuzz_ops, sanitized
    for name in ("fuzz_ops", "sanitized"):
        sys.modules.pop(name, None)


@pytest.mark.long
def test_damaged_arguments(tools: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    fuzz_ops, _ = tools
    assert fuzz_ops.run_calls(0, 500, library=None, current=tmp_path / "call") == ""


@pytest.mark.long
def test_damaged_arguments_under_sanitizers(
    tools: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    fuzz_ops, sanitized = tools
    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None:
        pytest.skip("needs a C++ compiler")
    library = sanitized.build()
    seeds = 8
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(
            pool.map(
                lambda seed: fuzz_ops.run_calls(
                    seed, 100_000 // seeds, library=library, current=tmp_path / f"call{seed}"
                ),
                range(1, 1 + seeds),
            )
        )
    assert found == [""] * seeds
