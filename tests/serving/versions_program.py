"""Compiles and runs ``versions_check.cpp``: a live package in C++, whose versions threads run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from emulator.build import ROOT, compile_source, one_build_at_a_time, run_compiler

import torch_dynemb
from tutorials.serving.compile_command import compile_flags, link_flags

OUTPUT = ROOT / "build" / "versions_check"
DRIVER = ROOT / "tests" / "serving" / "versions_check.cpp"
OPS = Path(torch_dynemb.__file__).with_name("_C.abi3.so")


def build() -> Path:
    """Builds the program, unless it is current, without optimisation, which takes long.

    Raises:
        RuntimeError: what the compiler printed.
    """
    program = OUTPUT / "versions_check"
    flags = [*compile_flags(), "-O0", "-g1", "-Wall", "-Wextra"]
    with one_build_at_a_time(OUTPUT):
        object_file = compile_source(DRIVER, flags, output=OUTPUT)
        if not program.is_file() or program.stat().st_mtime < object_file.stat().st_mtime:
            run_compiler([str(object_file), *link_flags(), "-o", str(program)])
    return program


def run(program: Path, package: Path, *, versions: int) -> dict[str, Any]:
    """What it saw.

    Args:
        program: from :func:`build`.
        package: the live one that tests share.
        versions: how many are made one after another.

    Raises:
        RuntimeError: it failed.
    """
    command = [program, package, OPS, str(versions)]
    reply = subprocess.run(command, capture_output=True, text=True, check=False)
    if reply.returncode != 0:
        raise RuntimeError(f"versions_check ended with {reply.returncode}: {reply.stderr}")
    seen: dict[str, Any] = json.loads(reply.stdout)
    return seen
