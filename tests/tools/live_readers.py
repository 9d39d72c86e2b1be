"""Compiles and runs programs of threads that read what another one writes: live tables,
``tests/serving/live_check.cpp`` and ``publish_check.cpp``, and a bucket of an index,
``tests/table/probe_check.cpp``.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from emulator.build import ROOT, SOURCES, compile_source, one_build_at_a_time, run_compiler
from emulator.build import torch_flags as flags_of_torch

OUTPUT = ROOT / "build" / "live_readers"
LIVE = [
    ROOT / "tests" / "serving" / "live_check.cpp",
    SOURCES / "cpu" / "serving" / "live_writer.cpp",
]
PUBLISHED = [ROOT / "tests" / "serving" / "publish_check.cpp", LIVE[1]]
PROBES = [
    ROOT / "tests" / "table" / "probe_check.cpp",
    SOURCES / "cpu" / "index" / "moving_entries.cpp",
]
FLAGS = ["-std=c++17", "-O2", "-g1", "-pthread", "-Wall", "-Wextra", "-Wno-psabi"]
# it learns of fences by shared_words.h
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


def build(sources: list[Path] = LIVE, *, sanitized: bool = False) -> Path:
    """Builds a program; only what has changed is compiled again.

    Args:
        sources: ``LIVE``, ``PUBLISHED`` or ``PROBES``.
        sanitized: with ThreadSanitizer.

    Returns:
        Its path.

    Raises:
        RuntimeError: what the compiler printed about the files that it refused.
    """
    checks = THREAD_SANITIZER if sanitized else []
    output = OUTPUT / ("sanitized" if sanitized else "plain")
    compile_flags, link_flags = flags_of_torch()
    program = output / sources[0].stem
    with one_build_at_a_time(output):
        flags = [*FLAGS, *checks, *compile_flags]
        objects = [compile_source(source, flags, output=output) for source in sources]
        newest = max(file.stat().st_mtime for file in objects)
        if not program.is_file() or program.stat().st_mtime < newest:
            run_compiler([*checks, "-pthread", "-o", str(program), *map(str, objects), *link_flags])
    return program


def run(program: Path, *, reads: int, validated: bool, dim: int, inserts: bool = False) -> Readings:
    """Runs ``live_check``.

    Args:
        program: from :func:`build`.
        reads: rows to read at least.
        validated: False: readers do not look whether a row was theirs and whole.
        dim: columns of a row.

    Raises:
        RuntimeError: it failed, or ThreadSanitizer found a race.
    """
    return Readings(**printed(program, reads, int(validated), dim))


def printed(program: Path, *arguments: int) -> dict[str, int]:
    """Runs a program; returns what it prints.

    Raises:
        RuntimeError: it failed, or ThreadSanitizer found a race.
    """
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=66"}
    # without address randomisation, which some kernels do so widely that the sanitizer refuses
    command = ["setarch", "-R", str(program), *map(str, arguments)]
    reply = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if reply.returncode != 0:
        raise RuntimeError(f"{program.name} ended with {reply.returncode}: {reply.stderr}")
    result: dict[str, int] = json.loads(reply.stdout)
    return result
