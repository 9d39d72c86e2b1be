"""Starts a server of tutorials/serving as a process, and stops it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """That of this process, with the repository to import from."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


class Running(NamedTuple):
    """A server's process, and its port."""

    process: subprocess.Popen[str]
    port: int


@contextmanager
def started(command: Sequence[str | Path], stderr: IO[str] | None = None) -> Iterator[Running]:
    """A server, which is stopped at the end."""
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment(), cwd=ROOT
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()  # ends without one where the server does
        port = re.search(r"port (\d+)$", line)
        assert port is not None, line
        yield Running(server, int(port.group(1)))
    finally:
        server.terminate()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


@contextmanager
def running(command: Sequence[str | Path]) -> Iterator[int]:
    """The port of a server, which is stopped at the end."""
    with started(command) as server:
        yield server.port


def need_libraries() -> None:
    """Skip a test, or fail it in CI, where libraries of the C++ server are missing."""
    compiler = os.environ.get("CXX", "c++")
    source = "#include <simdjson.h>\n#include <boost/beast/http/parser.hpp>"
    command = [compiler, "-std=c++20", "-E", "-x", "c++", "-"]
    if subprocess.run(
        command, input=source, text=True, capture_output=True, check=False
    ).returncode:
        missing = "no Boost.Beast or simdjson: apt-get install libboost-dev libsimdjson-dev"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)


PYTHON_SERVER = [sys.executable, "-m", "tutorials.serving.server"]
