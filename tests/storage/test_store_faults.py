"""Stores on a disk that is full, that fails, or that knows no direct reads and writes."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import file_shim
import pytest
from file_shim import Fault

pytestmark = pytest.mark.cpu_only("is about files; tables with rows on a disk are on the CPU")


def run(tmp_path: Path, faults: list[Fault], full: Path, fails: Path) -> dict[str, dict[str, str]]:
    here = Path(__file__).parent
    command = [sys.executable, str(here / "faulty_store.py"), tmp_path / "stores", full, fails]
    environment = file_shim.environment(tmp_path, faults=faults)
    reply = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert reply.returncode == 0, reply.stderr
    said: dict[str, dict[str, str]] = json.loads(reply.stdout)
    return said


@pytest.mark.long
def test_faults_of_the_disk(tmp_path: Path) -> None:
    """In one process, which takes long to begin: all rows stay right, and errors say which file."""
    stores = tmp_path / "stores"
    stores.mkdir()
    full, fails = tmp_path / "full now", tmp_path / "fails now"
    faults = [
        Fault("fallocate", stores / "full", errno.ENOSPC, switch=full),
        Fault("open", stores / "buffered/rows/slab0/0", errno.EINVAL, times=1),
        Fault("pwrite", stores / "failing" / "rows", errno.EIO, switch=fails),
    ]
    said = run(tmp_path, faults, full, fails)

    told = rf"disk full: path {stores}/full needs \d+ more bytes for \d+ rows of slab0, but there "
    told += (
        r"are \d+ in the file system; snapshots keep 0 segments .* Free space in the file system"
    )
    assert re.search(told, said["full"]["told"])
    assert re.search(told, said["full"]["again"])
    assert said["full"]["later"] == ""

    assert said["buffered"]["direct"] == ""

    written = rf"writing \d+ bytes at offset \d+ of {stores}/failing/rows/slab0/\w+ failed: Input/"
    assert re.search(written, said["failing"]["told"])
    assert said["failing"]["later"] == said["failing"]["told"]
