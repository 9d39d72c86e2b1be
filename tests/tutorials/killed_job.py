"""The job of the DLRM tutorial, killed by itself at a chosen moment: for processes of their own."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn
from unittest import mock

from torch_dynemb.files.disk import Disk
from tutorials.dlrm import train
from tutorials.dlrm.data import Position
from tutorials.dlrm.job.checkpoint import Checkpoints


def after_step(arguments: list[str], step: int) -> None:
    """Runs the job until it has made so many steps; a save may go on in the background."""
    steps = 0
    real = Checkpoints.after_step

    def counted(checkpoints: Checkpoints, position: Position) -> None:
        nonlocal steps
        real(checkpoints, position)
        steps += 1
        if steps == step:
            _die()

    with mock.patch.object(Checkpoints, "after_step", counted):
        train.main(arguments)


def in_save(arguments: list[str], save: int, write: int) -> None:
    """Runs the job until it writes for so manyth time in one of its saves, all counted from 1."""
    disk = _LastDisk(write)
    saves = 0
    real = Checkpoints.save

    def counted(checkpoints: Checkpoints, position: Position) -> None:
        nonlocal saves
        saves += 1
        checkpoints._wait()  # for the save before: its writes do not count
        disk.counts = saves == save
        real(checkpoints, position)

    with (
        mock.patch.object(Checkpoints, "save", counted),
        mock.patch.object(sys.modules["torch_dynemb.checkpoint.saving.save"], "_DISK", disk),
    ):
        train.main(arguments)


class _LastDisk(Disk):
    """A disk on which the process dies."""

    def __init__(self, writes: int) -> None:
        self.counts = False
        self._left = writes

    def write_at(self, file: int, data: memoryview, begin: int) -> int:
        self._count()
        return super().write_at(file, data, begin)

    def _count(self) -> None:
        self._left -= self.counts
        if self._left == 0:
            _die()


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL did not end the process")
