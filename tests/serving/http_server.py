"""Starts a server of tutorials/serving as a process, and stops it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """That of this process, with the repository to import from."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@contextmanager
def running(command: Sequence[str | Path]) -> Iterator[int]:
    """The port of a server, which is stopped at the end."""
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()  # ends without one where the server does
        port = re.search(r"port (\d+)$", line)
        assert port is not None, line
        yield int(port.group(1))
    finally:
        server.terminate()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


PYTHON_SERVER = [sys.executable, "-m", "tutorials.serving.server"]
