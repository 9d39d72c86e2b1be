"""Compiles and runs ``versions_check.cpp``: threads run versions of a live package in C++."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emulator.build import ROOT, compile_source, one_build_at_a_time, run_compiler

from torch_dynemb import serving

OUTPUT = ROOT / "build" / "versions_check"
DRIVER = ROOT / "tests" / "serving" / "versions_check.cpp"


def build() -> Path:
    """Builds the program, unless it is current, without optimisation, which takes long.

    Raises:
        RuntimeError: what the compiler printed.
    """
    program = OUTPUT / "versions_check"
    flags = [*serving.cpp_flags().compile, "-O0", "-g1", "-Wall", "-Wextra"]
    with one_build_at_a_time(OUTPUT):
        object_file = compile_source(DRIVER, flags, output=OUTPUT)
        if not program.is_file() or program.stat().st_mtime < object_file.stat().st_mtime:
            run_compiler([str(object_file), *serving.cpp_flags().link, "-o", str(program)])
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
    command = [program, package, serving.cpp_flags().library, str(versions)]
    reply = subprocess.run(command, capture_output=True, text=True, check=False)
    if reply.returncode != 0:
        raise RuntimeError(f"versions_check ended with {reply.returncode}: {reply.stderr}")
    seen: dict[str, Any] = json.loads(reply.stdout)
    return seen


class Following:
    """The program while it follows a delta log.

    Args:
        program: from :func:`build`.
        package: the live one that tests share.
        log: directory of the log.
    """

    def __init__(self, program: Path, package: Path, log: Path) -> None:
        self.process = subprocess.Popen(
            [program, package, serving.cpp_flags().library, "follow", log],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def update(self, until: int = 1 << 62) -> dict[str, Any]:
        """Has it take commits up to a number; what it says then."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{until}\n")
        self.process.stdin.flush()
        return self._line()

    def end(self) -> dict[str, Any]:
        """Ends it; what its thread saw."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        return said


@contextmanager
def following(program: Path, package: Path, log: Path) -> Iterator[Following]:
    """The program, which is killed at the end."""
    started = Following(program, package, log)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
        for pipe in (started.process.stdin, started.process.stdout):
            assert pipe is not None
            pipe.close()
