"""Checkpoints of the job: when it saves them, and how it goes on from one.

:mod:`torch_dynemb.checkpoint` writes them: a folder that is whole, or is not there. It does not
depend on the number of processes that wrote it; on several machines it has to lie on a file system
that they share.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import torch_dynemb as td
from torch_dynemb.checkpoint.entries import MANIFEST
from tutorials.dlrm.criteo import Position
from tutorials.dlrm.loop import Moment, Pass
from tutorials.dlrm.options import Options


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says why and what to do."""


class Checkpoints:
    """The checkpoints of a run, each in place of the one before.

    Ranks that train together call its methods together. At the end of a ``with`` block no save goes
    on in the background any more.

    Args:
        opts: Of the job.
        progress: With the model.
        optimizers: Whose state is saved; that of rows is in the tables.
        settings: What a run that goes on must have in common with this one.
        quiet: Say nothing.

    Raises:
        CheckpointError: Something else is where checkpoints are to be.
    """

    def __init__(
        self,
        opts: Options,
        progress: Pass,
        optimizers: Sequence[torch.optim.Optimizer],
        settings: Mapping[str, object],
        *,
        quiet: bool = False,
    ) -> None:
        self.path = path_of(opts)
        self._opts, self._progress, self._optimizers = opts, progress, optimizers
        self._settings, self._quiet = settings, quiet
        self._last: td.checkpoint.SaveHandle | None = None
        if self.path.exists() and not (self.path / MANIFEST).exists():
            raise CheckpointError(
                f"{self.path} is no checkpoint of this version of the program: resume with the "
                "version that wrote it, or remove it"
            )

    def resume(self) -> Position:
        """Go on from the checkpoint, if there is one and the options say so.

        Returns:
            Where its reader stood; the beginning without a checkpoint.

        Raises:
            CheckpointError: It is damaged, or of an earlier version, or its settings differ.
        """
        if not self._opts.resume:
            return Position()
        saved = read(self.path)
        if saved is None:
            older = self.path.with_suffix(".pt")
            if older.exists():
                raise CheckpointError(
                    f"{older} is of an earlier version of this program: resume with that version, "
                    "or start without --resume"
                )
            self._say(f"no checkpoint at {self.path}: beginning with the first line")
            return Position()
        check_same_settings(saved["settings"], self._settings)
        with _damage_refused(self.path):
            saved = td.checkpoint.load(self.path, self._progress.model).state
        for optimizer, state in zip(self._optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._progress.load_state_dict(saved["progress"])
        self._progress.seconds = saved["seconds"]
        moments = saved.get("moments", [])  # earlier versions kept none
        self._progress.moments = [Moment(*values) for values in moments]
        torch.set_rng_state(saved["rng"])
        position = Position(*saved["position"])
        self._say(f"resuming after line {position.line} from {self.path}")
        return position

    def after_step(self, position: Position) -> None:
        """Save after every so many steps.

        Args:
            position: Of the reader.
        """
        if self._progress.step % self._opts.checkpoint_every == 0:
            self.save(position)

    def save(self, position: Position) -> None:
        """Save, once the save before has ended.

        Args:
            position: Of the reader.
        """
        self._wait()
        state = {
            "settings": self._settings,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "progress": self._progress.state_dict(),
            "seconds": self._progress.seconds,
            "moments": [tuple(moment) for moment in self._progress.moments],
            "rng": torch.get_rng_state(),  # of the only generator that training uses
            "position": tuple(position),
        }
        self._last = td.checkpoint.save(
            self.path,
            self._progress.model,
            asynchronous=self._opts.async_checkpoint,
            state=state,
            progress=False if self._quiet else None,
        )

    def _wait(self) -> None:
        if self._last is not None:
            self._last.wait()

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._wait()


def path_of(opts: Options) -> Path:
    """Return where the checkpoint of a job is."""
    return opts.out / "checkpoint"


def read(path: Path) -> dict[str, Any] | None:
    """Return what a checkpoint says of the run that wrote it; None: there is no checkpoint.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        with _damage_refused(path), td.checkpoint.open(path) as saved:
            state: dict[str, Any] = saved.state
    except FileNotFoundError:
        return None
    return state


def report_interruption(opts: Options) -> None:
    """Say on stderr, once for all ranks, what a job leaves that Ctrl-C has ended."""
    if os.environ.get("RANK", "0") != "0":
        return
    path = path_of(opts)
    saved = read(path)
    if saved is None:
        print("interrupted before the first checkpoint", file=sys.stderr)
    else:
        line = Position(*saved["position"]).line
        print(f"interrupted; --resume goes on after line {line} from {path}", file=sys.stderr)


@contextmanager
def _damage_refused(path: Path) -> Iterator[None]:
    """Say what to do about a damaged checkpoint."""
    try:
        yield
    except (td.errors.DamagedFileError, td.errors.UnsupportedFormatError) as error:
        raise CheckpointError(f"{error}; remove {path} and start without --resume") from error


def check_same_settings(recorded: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Refuse to go on under settings that would lead elsewhere.

    Args:
        recorded: Settings by name, from the checkpoint.
        given: Those of this run.

    Raises:
        CheckpointError: Any of them differs.
    """
    differing = [
        f"{name}: {recorded.get(name)!r} in the checkpoint, {given.get(name)!r} now"
        for name in sorted({*recorded, *given})
        if recorded.get(name) != given.get(name)
    ]
    if differing:
        raise CheckpointError(
            "cannot resume, the settings differ ("
            + "; ".join(differing)
            + "); repeat the settings of the checkpoint, or start without --resume"
        )
