"""Commits of the job between its checkpoints (--commit-every): what changed, not whole tables."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

import torch_dynemb as td
from torch_dynemb.checkpoint.file_names import MANIFEST
from tutorials.dlrm.data import Position
from tutorials.dlrm.job.checkpoint import (
    Checkpoints,
    check_same_settings,
    commits_of,
    remedy,
)


class Commits(Checkpoints):
    """A delta log of a run: any number of ranks goes on from its last commit.

    A log belongs to one number of ranks, so each start writes one of its own, a numbered folder,
    and removes those before it once its base is whole. Checkpoints are the bases of the log.
    """

    def resume(self) -> Position:
        """Go on from the last commit, or a checkpoint, if the options ask for it; begin a log.

        Returns:
            The position of its reader; the beginning without either.

        Raises:
            CheckpointError: It is damaged, or its settings differ.
        """
        folder = commits_of(self._opts)
        logs, model = _logs(folder), self._progress.model
        if not self._opts.resume or logs.last is None:
            position = self._from_checkpoint()
        else:
            last = folder / str(logs.last)
            with remedy(last):
                base = next(last.glob(f"base*/{MANIFEST}")).parent
                with td.checkpoint.open(base) as saved:
                    check_same_settings(saved.state["settings"], self._settings)
                state = td.delta_log.resume(last, model, progress=False).state
            position = self._take(state, last)
        self._log = td.delta_log.DeltaLog(folder / str(logs.following), resume=True)
        self._log.attach(model, state=self._state(position))
        if not dist.is_initialized() or dist.get_rank() == 0:
            for number in logs.numbers:
                shutil.rmtree(folder / str(number))
        return position

    def after_step(self, position: Position) -> None:
        """Save or commit after every so many steps, with the position of the reader."""
        super().after_step(position)
        step = self._progress.step
        if step % self._opts.commit_every == 0 and step % self._opts.checkpoint_every != 0:
            self._log.publish(state=self._state(position))

    def save(self, position: Position) -> None:
        """Save a new base of the log, with the position of the reader."""
        self._log.save(state=self._state(position), asynchronous=self._opts.async_checkpoint)

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # else other ranks may be gone, and what is committed stays
            self._log.close()


class _Logs(NamedTuple):
    """The logs in a folder."""

    numbers: list[int]  # of all of them, the newest first
    last: int | None  # the newest one with a whole base
    following: int  # the number of the next one


def _logs(folder: Path) -> _Logs:
    """List the logs as the first rank sees them; all ranks call it."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = sorted((int(path.name) for path in folder.iterdir()), reverse=True)
    whole = [n for n in numbers if any((folder / str(n)).glob(f"base*/{MANIFEST}"))]
    found = [_Logs(numbers, max(whole, default=None), max(numbers, default=0) + 1)]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]
