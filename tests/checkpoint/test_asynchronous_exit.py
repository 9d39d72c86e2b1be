"""Programs that end while a checkpoint is written: they wait for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torch_dynemb as td
from torch_dynemb import checkpoint

pytestmark = pytest.mark.cpu_only("programs of their own")

PROGRAM = """
import sys, threading
import torch
import torch_dynemb as td
from torch_dynemb.files.disk import Disk

class LateDisk(Disk):
    def create(self, path):
        threading.main_thread().join()  # the program has come to its end
        if sys.argv[2] == "fails":
            raise OSError(28, "No space left on device")
        return super().create(path)

sys.modules["torch_dynemb.checkpoint.saving.save"]._DISK = LateDisk()
items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
items(torch.arange(50)).sum().backward()
items.optimizer.step()
td.checkpoint.save(sys.argv[1], items, asynchronous=True)
print("the end")
"""


def end_of(path: Path, how: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", PROGRAM, str(path), how]
    return subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)


@pytest.mark.long
def test_a_program_ends_when_the_checkpoint_is_whole(tmp_path: Path) -> None:
    done = end_of(tmp_path / "c", "works")
    assert done.stdout == "the end\n"
    assert "Error" not in done.stderr
    items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
    assert checkpoint.load(tmp_path / "c", items).tables["embedding"].ids == 50
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.long
def test_a_failure_that_nobody_can_be_told_is_printed(tmp_path: Path) -> None:
    done = end_of(tmp_path / "c", "fails")
    assert done.stdout == "the end\n"
    assert "/c has failed" in done.stderr
    assert "No space left on device" in done.stderr
    assert list(tmp_path.iterdir()) == []
