"""The C++ readers of blocks, by a program of their own: reuse, failures, threads, forks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from emulator.build import FLAGS, run_compiler, torch_flags

import setup
from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("files, and no tables")

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    ROOT / "tests" / "storage" / "block_reader_selftest.cpp",
    *(
        ROOT / "csrc" / "cpu" / "storage" / f"{name}.cpp"
        for name in ("block_io", "block_progress", "thread_reader", "uring_reader")
    ),
]
WARNINGS = [flag for flag in FLAGS if flag.startswith("-W")]


def program(folder: Path, *, uring: setup.Uring | None) -> Path:
    """The compiled self-test."""
    flags = ["-std=c++17", "-pthread", f"-I{ROOT / 'csrc'}", *WARNINGS, "-Werror"]
    archives = []
    if uring is not None:
        flags += ["-DDYNEMB_HAS_URING"]
        flags += [] if uring.headers is None else ["-isystem", str(uring.headers)]
        archives = [str(uring.archive)]
    compile_flags, link_flags = torch_flags()
    objects = [str(folder / f"{source.stem}.o") for source in SOURCES]
    for source, compiled in zip(SOURCES, objects, strict=True):
        run_compiler([*flags, *compile_flags, "-c", str(source), "-o", compiled])
    built = folder / "selftest"
    run_compiler(["-pthread", "-o", str(built), *objects, *archives, *link_flags])
    return built


@pytest.mark.long
def test_readers_with_liburing(tmp_path: Path) -> None:
    uring = setup.wanted_uring(os.environ)
    if uring is None:
        pytest.skip("liburing is missing")
    reply = subprocess.run(
        [program(tmp_path, uring=uring), tmp_path], capture_output=True, text=True, check=False
    )
    assert (reply.returncode, reply.stderr) == (0, "")
    if ops.store_io_paths()[0] == ops.IoPath.URING:
        assert reply.stdout == "both\n"


@pytest.mark.long
def test_readers_without_liburing(tmp_path: Path) -> None:
    reply = subprocess.run(
        [program(tmp_path, uring=None), tmp_path], capture_output=True, text=True, check=False
    )
    assert (reply.returncode, reply.stderr) == (0, "")
    assert reply.stdout == "threads\n"
