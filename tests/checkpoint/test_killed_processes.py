"""A process that SIGKILL ends while it saves again and again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import endless_saves
import pytest
import torch

import torch_dynemb as td
from torch_dynemb import checkpoint

pytestmark = pytest.mark.cpu_only("is about files, which know no device")


def check_content(path: Path) -> int:
    """The number of the content that is there, as a whole."""
    table = td.DynamicEmbedding(8, optimizer=td.SGD(lr=0.1), max_rows=400, name="table")
    number: int = checkpoint.load(path, table).state["number"]
    expected = endless_saves.filled(number)
    ids = torch.arange(number % 7, endless_saves.IDS)
    assert table.sizes() == expected.sizes()
    assert torch.equal(table.group.read(0, ids), expected.group.read(0, ids))
    return number


def kill_often(path: Path, times: int) -> None:
    """Kills processes that save to one path, each after a time of its own."""
    rng = random.Random(7)
    program = subprocess.Popen(
        [sys.executable, endless_saves.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        for _ in range(times):
            program.stdin.write(f"{path}\n")
            program.stdin.flush()
            child = int(program.stdout.readline())
            before = list(path.parent.iterdir())
            while list(path.parent.iterdir()) == before or not path.exists():
                time.sleep(0.001)  # until it has begun to change what is there
            time.sleep(rng.random() * 0.1)
            os.kill(child, signal.SIGKILL)
            assert program.stdout.readline() == "ended\n"
            assert check_content(path) >= 1
    finally:
        program.kill()
        program.communicate()
    checkpoint.save(path, endless_saves.filled(5), state={"number": 5})
    assert check_content(path) == 5
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.long
def test_killed_process_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    kill_often(tmp_path / "last", 3)


@pytest.mark.long
def test_often_killed_process_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    kill_often(tmp_path / "last", 50)
