"""Checkpoints of the job: when to save them, and how to go on from one."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import torch_dynemb as td
from torch_dynemb.checkpoint.file_names import MANIFEST
from tutorials.dlrm.data import Position
from tutorials.dlrm.loop import Pass


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says why and what to do."""


class Checkpoints:
    """The checkpoints of a run, each in place of the one before.

    Ranks that train together call its methods together. Leaving a ``with`` block waits for a save
    that goes on in the background.

    Args:
        opts: Of the job.
        progress: With the model.
        optimizers: Those with a state to save; that of rows is in the tables.
        settings: A run that goes on must have the same ones.
        quiet: Print nothing.

    Raises:
        CheckpointError: Something else is in the place of the checkpoint.
    """

    def __init__(
        self,
        opts: Namespace,
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
                f"{self.path} is not a checkpoint of this version of the program: resume with the "
                "version that wrote it, or remove it"
            )

    def resume(self) -> Position:
        """Go on from the checkpoint, if there is one and the options ask for it.

        Returns:
            The position of its reader; the beginning without a checkpoint.

        Raises:
            CheckpointError: It is damaged, its settings differ, or there are commits.
        """
        commits = commits_of(self._opts)
        if self._opts.resume and commits.exists():
            raise CheckpointError(
                f"{commits} has commits of the run: add --commit-every, or remove it"
            )
        return self._from_checkpoint()

    def _from_checkpoint(self) -> Position:
        if not self._opts.resume:
            return Position()
        saved = read(self.path)
        if saved is None:
            self._say(f"no checkpoint at {self.path}: beginning with the first line")
            return Position()
        check_same_settings(saved["settings"], self._settings)
        with remedy(self.path):
            saved = td.checkpoint.load(self.path, self._progress.model).state
        return self._take(saved, self.path)

    def after_step(self, position: Position) -> None:
        """Save after every so many steps, with the position of the reader."""
        if self._progress.step % self._opts.checkpoint_every == 0:
            self.save(position)

    def save(self, position: Position) -> None:
        """Save, once the save before has ended, with the position of the reader."""
        self._wait()
        self._last = td.checkpoint.save(
            self.path,
            self._progress.model,
            asynchronous=self._opts.async_checkpoint,
            state=self._state(position),
            progress=False if self._quiet else None,
        )

    def _state(self, position: Position) -> dict[str, Any]:
        """Return all but the model, of all ranks, which must call this together."""
        return {
            "settings": self._settings,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "progress": self._progress.state_dict(),
            "rng": torch.get_rng_state(),  # of the only generator that training uses
            "position": tuple(position),
        }

    def _take(self, state: Mapping[str, Any], path: Path) -> Position:
        """Take over a state of :meth:`_state` that was at a path; return its position."""
        for optimizer, of_optimizer in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(of_optimizer)
        self._progress.load_state_dict(state["progress"])
        torch.set_rng_state(state["rng"])
        position = Position(*state["position"])
        self._say(f"resuming after line {position.line} from {path}")
        return position

    def _wait(self) -> None:
        if self._last is not None:
            self._last.wait()

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self._wait()


def path_of(opts: Namespace) -> Path:
    """Return the folder of the checkpoint of a job."""
    path: Path = opts.out / "checkpoint"
    return path


def commits_of(opts: Namespace) -> Path:
    """Return the folder of the logs of a job with ``--commit-every``."""
    path: Path = opts.out / "commits"
    return path


def read(path: Path) -> dict[str, Any] | None:
    """Return the state of the run that wrote a checkpoint; None: nothing is there.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        with remedy(path), td.checkpoint.open(path) as saved:
            state: dict[str, Any] = saved.state
    except FileNotFoundError:
        return None
    return state


def report_interruption(opts: Namespace) -> None:
    """Say on stderr, once for all ranks, from where a job goes on that Ctrl-C has ended."""
    if os.environ.get("RANK", "0") != "0":
        return
    if opts.commit_every:
        print("interrupted; --resume goes on from the last commit", file=sys.stderr)
        return
    path = path_of(opts)
    saved = read(path)
    if saved is None:
        print("interrupted before the first checkpoint", file=sys.stderr)
    else:
        line = Position(*saved["position"]).line
        print(f"interrupted; --resume goes on after line {line} from {path}", file=sys.stderr)


@contextmanager
def remedy(path: Path) -> Iterator[None]:
    """Say what to do about a damaged checkpoint."""
    try:
        yield
    except (td.errors.DamagedFileError, td.errors.UnsupportedFormatError) as error:
        raise CheckpointError(f"{error}; remove {path} and start without --resume") from error


def check_same_settings(recorded: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Raise CheckpointError if the settings of a checkpoint and those of this run differ."""
    differing = [
        f"{name}: {recorded.get(name)!r} in the checkpoint, {given.get(name)!r} now"
        for name in sorted({*recorded, *given})
        if recorded.get(name) != given.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"cannot resume, the settings differ ({'; '.join(differing)}); repeat the settings of "
            "the checkpoint, or start without --resume"
        )
