"""Compiles and runs ``tests/serving/live_check.cpp``: readers of a live table beside its writer."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from emulator.build import ROOT, SOURCES, compile_source, one_build_at_a_time, run_compiler
from emulator.build import torch_flags as flags_of_torch

OUTPUT = ROOT / "build" / "live_readers"
DRIVER = ROOT / "tests" / "serving" / "live_check.cpp"
WRITER = SOURCES / "cpu" / "serving" / "live_writer.cpp"
FLAGS = ["-std=c++17", "-O2", "-g1", "-pthread", "-Wall", "-Wextra", "-Wno-psabi"]
# all that threads share is atomic, which is what the sanitizer looks for; fences it does not know
THREAD_SANITIZER = ["-fsanitize=thread", "-Wno-tsan"]


class Readings(NamedTuple):
    """What a run saw.

    Attributes:
        torn: rows that no (id, version) has.
        stale: rows of an earlier version than the id had when the read began, or of an id that was
            not there.
        missing: ids that were there, and were not found.
        damaged: batches that the reader gave up.
        reads, writes, rehashes: how many.
    """

    torn: int
    stale: int
    missing: int
    damaged: int
    reads: int
    writes: int
    rehashes: int

    @property
    def wrong(self) -> int:
        return self.torn + self.stale + self.missing + self.damaged


def build(*, sanitized: bool = False) -> Path:
    """Builds the program; only what has changed is compiled again.

    Args:
        sanitized: with ThreadSanitizer.

    Returns:
        Its path.

    Raises:
        RuntimeError: what the compiler printed about the files that it refused.
    """
    checks = THREAD_SANITIZER if sanitized else []
    output = OUTPUT / ("sanitized" if sanitized else "plain")
    compile_flags, link_flags = flags_of_torch()
    program = output / "live_check"
    with one_build_at_a_time(output):
        flags = [*FLAGS, *checks, *compile_flags]
        objects = [compile_source(source, flags, output=output) for source in (DRIVER, WRITER)]
        newest = max(file.stat().st_mtime for file in objects)
        if not program.is_file() or program.stat().st_mtime < newest:
            run_compiler([*checks, "-pthread", "-o", str(program), *map(str, objects), *link_flags])
    return program


def run(program: Path, *, reads: int, validated: bool, dim: int) -> Readings:
    """Runs it.

    Args:
        program: from :func:`build`.
        reads: rows to read at least.
        validated: False: readers do not look whether a row was theirs and whole.
        dim: columns of a row.

    Raises:
        RuntimeError: it failed, or ThreadSanitizer found a race.
    """
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=66"}
    # without address randomisation, which some kernels do so widely that the sanitizer refuses
    command = ["setarch", "-R", str(program), str(reads), str(int(validated)), str(dim)]
    reply = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if reply.returncode != 0:
        raise RuntimeError(f"live_check ended with {reply.returncode}: {reply.stderr}")
    return Readings(**json.loads(reply.stdout))
