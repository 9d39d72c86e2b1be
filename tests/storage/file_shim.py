"""Processes with calls of the file system that fail, wait or are logged, as a test says.

A library in ``shim/`` stands before the C library's functions (``LD_PRELOAD``). It sees the calls
of our C++ code and of Python's ``os`` and ``open``; not C's own streams (``fopen``), memory mapped
files, io_uring, ``sendfile`` and ``copy_file_range``. Where a test needs a read to fail, it has
threads read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "shim"
OUTPUT = Path(__file__).resolve().parents[2] / "build" / "file_shim"

# Each with all variants of it, such as pwrite64 and pwritev for pwrite.
CALLS = (
    *("pread", "read", "pwrite", "write", "fsync", "fdatasync", "ftruncate", "fallocate"),
    *("open", "mkdir", "unlink", "rename", "link"),
)
SHORT = 0  # in place of an errno: half of what was asked for is transferred


@dataclass(frozen=True)
class Fault:
    """Some calls below a path fail.

    Attributes:
        call: one of ``CALLS``.
        prefix: what the path begins with; of a rename or link the old one.
        error: their errno, or ``SHORT`` for reads and writes.
        first: number of the first one, from 1.
        times: how many fail, one after another.
        switch: a file; calls are counted, and fail, while it is there. None: always.
    """

    call: str
    prefix: Path
    error: int = errno.EIO
    first: int = 1
    times: int = sys.maxsize
    switch: Path | None = None


@dataclass(frozen=True)
class Hold:
    """Calls below a path wait while a file is there.

    The first of them to wait makes the file ``reached``.

    Attributes:
        call: one of ``CALLS``.
        prefix: what the path begins with.
        switch: the file.
    """

    call: str
    prefix: Path
    switch: Path

    @property
    def reached(self) -> Path:
        return Path(f"{self.switch}.reached")


@cache
def library() -> Path:
    """Return the compiled library; skip the test without a C compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"C compiler {compiler[0]} is missing")
    sources = sorted(SOURCES.glob("*.c"))
    text = b"".join(path.read_bytes() for path in [*sources, SOURCES / "shim.h"])
    built = OUTPUT / f"file_shim_{hashlib.sha256(text).hexdigest()[:16]}.so"
    OUTPUT.mkdir(parents=True, exist_ok=True)
    with (OUTPUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.is_file():
            flags = ["-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
            # a checked read or open calls another function than the one that it is written as
            flags += ["-U_FORTIFY_SOURCE", "-o", f"{built}.new"]
            subprocess.run([*compiler, *flags, *map(str, sources)], check=True)
            os.replace(f"{built}.new", built)
    return built


def environment(
    folder: Path,
    *,
    log: Path | None = None,
    faults: Sequence[Fault] = (),
    holds: Sequence[Hold] = (),
) -> dict[str, str]:
    """Variables for a process that is to be seen.

    Args:
        folder: for the configuration, and the log: ``folder / "changes.log"``, which goes on where
            it is there already. Not below ``log``.
        log: a folder; what changes files below it is written down.
        faults: calls that fail; of several for one call the last one counts.
        holds: calls that wait.

    Returns:
        The variables of this process, with those of the library.
    """
    lines = [] if log is None else [("log", folder / "changes.log", log.resolve())]
    for fault in faults:
        assert fault.call in CALLS
        numbers = (fault.first, fault.times, fault.error)
        prefix = _without_links(fault.prefix)
        lines.append(("fault", fault.call, *numbers, prefix, fault.switch or ""))
    for hold in holds:
        assert hold.call in CALLS
        lines.append(("hold", hold.call, _without_links(hold.prefix), hold.switch))
    configuration = folder / "file_shim.txt"
    configuration.write_text("".join("\t".join(map(str, words)) + "\n" for words in lines))
    preload = " ".join(filter(None, [str(library()), os.environ.get("LD_PRELOAD")]))
    return {**os.environ, "LD_PRELOAD": preload, "DYNEMB_FILE_SHIM": str(configuration)}


def _without_links(prefix: Path) -> Path:
    """As the library names files: folders without links."""
    return prefix.parent.resolve() / prefix.name
