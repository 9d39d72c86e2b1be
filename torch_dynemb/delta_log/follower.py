"""Followers: models that stay up to date with a delta log."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Literal

import torch.distributed as dist
from torch import nn

from torch_dynemb.argument_checks import integer, number
from torch_dynemb.changes.batch import Batch
from torch_dynemb.changes.commits import commit_of
from torch_dynemb.checkpoint.file_names import MANIFEST
from torch_dynemb.checkpoint.loading.load import load
from torch_dynemb.checkpoint.manifest.file import read_manifest
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.delta_log.log_folder import base_folder, base_folders, newest_base
from torch_dynemb.delta_log.reader import LogReader, batch_of, sinks_of
from torch_dynemb.delta_log.sink import DeltaSink
from torch_dynemb.delta_log.targets import FollowTarget, WholeTarget, target_of
from torch_dynemb.errors import InUseError
from torch_dynemb.files.locations import Location, is_url, local, location_of
from torch_dynemb.files.presence import is_file
from torch_dynemb.process.torch_modes import one_thread, plain_torch

Log = str | PathLike[str] | DeltaSink | Sequence[DeltaSink]
Dense = Literal["follow", "keep"]


def check_dense(owner: str, dense: object) -> None:
    """Raise ValueError unless ``dense`` is one of its values.

    Args:
        owner: function that errors name.
        dense: the argument.
    """
    if dense not in ("follow", "keep"):
        raise ValueError(f"{owner}: dense is {dense!r}, expected 'follow' or 'keep'")


class Follower:
    """A model that applies the commits of a delta log; :func:`follow` creates it.

    Args:
        reader: reader of the log.
        target: object that applies the commits.
        dense: treatment of the dense state, see :func:`follow`.

    Attributes:
        dense: see the argument.
    """

    def __init__(self, reader: LogReader, target: FollowTarget, *, dense: Dense = "follow") -> None:
        self._reader, self._target = reader, target
        self.dense: Dense = dense
        self._dense_behind = 0
        if dense == "follow" and isinstance(target, WholeTarget):
            target.follow_dense()
        self._step: int | None = None
        self._taken_at: float | None = None
        self._one = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def sequence(self) -> int | None:
        """Number of the last commit that was applied, or that the base includes.

        None if nothing has been published since the base.
        """
        return self._reader.sequence

    @property
    def step(self) -> int | None:
        """Training step of the last applied commit; None if there was none."""
        return self._step

    @property
    def commit_age(self) -> float | None:
        """Seconds since the last commit was applied; None if there was none.

        A log that publishes every second has less than a few seconds. More means that the trainer
        has stopped publishing, or that this follower has stopped.
        """
        return None if self._taken_at is None else time.monotonic() - self._taken_at

    @property
    def dense_behind(self) -> int:
        """Number of applied commits with dense changes that were left out.

        It is 0 unless :attr:`dense` is ``"keep"``. A log without the dense state
        (``DeltaLog(dense=False)``) does not report such changes.
        """
        return self._dense_behind

    @plain_torch()
    def update(self, *, until: int | None = None) -> int:
        """Apply the available commits, each as a whole.

        If the model lies on several ranks, each of them follows by itself, up to the same number.

        Args:
            until: number of the last commit to apply; default: the newest one.

        Returns:
            Number of applied commits.

        Raises:
            NewBaseNeededError: the log does not continue from here: commits were dropped or rolled
                back, or it begins with another checkpoint.
            DamagedFileError: a commit is damaged.
            ValueError: the model cannot take a commit: a table is missing.
            NoRoomError: a table is too small; NoHeadroomError for a live one. In all cases earlier
                commits are applied, and nothing of the failed one.
        """
        if until is not None:
            integer("Follower.update: until", until, least=0, what="int or None")
        applied = 0
        with self._one, one_thread():
            for batches in self._reader.read(until):
                commit = commit_of(batches)
                changes_dense = bool(commit.dense)
                if self.dense == "keep":
                    commit = commit._replace(dense={})
                self._target.check(commit)
                taken = partial(self._taken, batches, commit.step, changes_dense)
                if isinstance(self._target, WholeTarget):
                    self._target.apply(commit, taken)
                else:
                    self._target.apply(commit)
                    taken()
                applied += 1
        return applied

    def _taken(self, batches: list[Batch], step: int, changes_dense: bool) -> None:
        self._reader.taken(batches)
        self._step, self._taken_at = step, time.monotonic()
        self._dense_behind += changes_dense and self.dense == "keep"

    def start(self, every_seconds: float = 0.01) -> None:
        """Start a thread that updates until :meth:`stop`, or until an update fails.

        Use it only for models that may be read meanwhile, such as those with live tables.

        Args:
            every_seconds: interval between searches for new commits.

        Raises:
            TypeError, ValueError: ``every_seconds`` is not a number above 0.
            InUseError: such a thread is running.
        """
        if not number("Follower.start: every_seconds", every_seconds) > 0:
            raise ValueError(
                f"Follower.start: every_seconds is {every_seconds}, expected more than 0"
            )
        if self._thread is not None:
            raise InUseError("Follower.start: a thread is updating already: call stop() first")
        self._stopping.clear()
        self._error = None

        def run() -> None:
            while not self._stopping.is_set():
                try:
                    self.update()
                except BaseException as error:
                    self._error = error
                    return
                self._stopping.wait(every_seconds)

        self._thread = threading.Thread(target=run, name="delta log follower", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the thread of :meth:`start`. The model has the commits before.

        Raises:
            Exception: error of the update.
        """
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop the thread, after the commit that it is applying.

        Raises:
            Exception: error that ended it earlier.
        """
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()


def follow(
    log: Log,
    model: nn.Module | FollowTarget,
    *,
    base: str | PathLike[str] | None = None,
    sequence: int | None = None,
    dense: Dense = "follow",
) -> Follower:
    """Keep a model up to date with what a :class:`DeltaLog` publishes.

    A model takes rows, removed ids and the dense state. One with live tables
    (:func:`torch_dynemb.serving.live`) serves meanwhile: its runs wait while a commit is applied,
    so that none reads two versions. A model that trains also takes custom scores, and optimizer
    state if the log has it and the optimizer is the same. Other scores stay its own.

    Args:
        log: directory or URL of the log, or directory of an increment; or a sink, or the sinks of
            all ranks that write it.
        model: model or target that applies the commits. It must have the content of the base, or of
            a commit.
        base: path of the checkpoint with the content of the model; default: the only base in the
            directory of the log.
        sequence: number of the commit with the content of the model, in place of a base.
        dense: ``"follow"``: commits change the dense state, too. ``"keep"``: it stays, and
            :attr:`Follower.dense_behind` counts the commits that it lacks. Runs of a model with
            live tables then never wait, and may read rows from before and after a commit.

    Returns:
        The follower. Nothing has been applied yet.

    Raises:
        TypeError: ``log`` is not a log, or ``model`` cannot follow.
        ValueError: both ``base`` and ``sequence`` are given, or neither for a log with several
            bases or outside a directory; or ``dense`` is wrong, or not ``"keep"`` for an increment.
        FileNotFoundError: ``base`` is not a checkpoint.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> from torch_dynemb import serving
        >>> bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), name="ads")
        >>> folder = tempfile.TemporaryDirectory()
        >>> log = td.delta_log.DeltaLog(folder.name + "/log")
        >>> log.attach(bag)
        >>> server = serving.live(bag, headroom=100)
        >>> follower = td.delta_log.follow(folder.name + "/log", server)
        >>> bag(torch.tensor([[1, 2], [3, 1]])).sum().backward()
        >>> bag.optimizer.step()
        >>> log.publish()
        1
        >>> log.flush()
        >>> follower.update()
        1
        >>> torch.equal(server(torch.tensor([[1, 3]])), bag.eval()(torch.tensor([[1, 3]])))
        True
        >>> log.close()
        >>> folder.cleanup()
    """
    check_dense("follow", dense)
    target = target_of(model)
    increment = isinstance(log, str | PathLike) and is_file(location_of("follow", log) / MANIFEST)
    if increment and is_url(log):
        raise ValueError(
            f"follow: {log} is an increment at a URL, which followers do not read: copy it to a "
            "local disk, or follow a DeltaLog"
        )
    if increment and dense == "follow":
        raise ValueError(
            f"follow: {log} is an increment, with the dense state outside its commit: give "
            "dense='keep', and load the dense state from checkpoint.open(path).dense()"
        )
    if increment:  # its files are those of a log
        log = local(location_of("follow", log))
        log = log / read_manifest(log).uuid
    sinks = sinks_of(log)
    if sequence is not None:
        if base is not None:
            raise ValueError(
                f"follow: both base ({base!r}) and sequence ({sequence}) are given: the model has "
                "the content of one of them"
            )
        integer("follow: sequence", sequence, least=0, what="int or None")
        return Follower(LogReader(sinks, base=None, sequence=sequence), target, dense=dense)
    with open_checkpoint(str(base_of("follow", log, base))) as saved:
        return Follower(LogReader(sinks, base=saved.uuid, sequence=None), target, dense=dense)


def replay(
    log: Log,
    model: nn.Module,
    *,
    base: str | PathLike[str] | None = None,
    until: int | None = None,
    optimizer_state: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> int:
    """Load the base of a delta log, and apply its commits up to one of them.

    Args:
        log: as for :func:`follow`.
        model: model to load, as for :func:`torch_dynemb.checkpoint.load`.
        base: path of the checkpoint; default: the newest one in the directory of the log.
        until: number of the last commit to apply; default: the newest one.
        optimizer_state, process_group: as for :func:`torch_dynemb.checkpoint.load`.

    Returns:
        Number of the last commit that was applied, or that the base includes; 0 if nothing is
        published.

    Raises:
        TypeError, ValueError: a wrong argument, or the base includes later commits.
        NewBaseNeededError: the log does not continue from the base.
        Exception: as :func:`torch_dynemb.checkpoint.load` and :meth:`Follower.update`.
    """
    path = str(base_of("replay", log, base))
    load(path, model, optimizer_state=optimizer_state, process_group=process_group)
    follower = follow(log, model, base=path)
    follower.update(until=until)
    reached = follower.sequence or 0
    if until is not None and reached != until:
        raise ValueError(
            f"replay: until is {until}, but the base and the commits after it lead to {reached}: "
            "the model has that content"
        )
    return reached


def base_of(owner: str, log: Log, base: str | PathLike[str] | None) -> Location:
    """Return the given checkpoint, or the one in the directory of a log.

    Args:
        owner: function that errors name. ``"follow"`` refuses a log with several bases; others take
            the newest one.
        log: the log.
        base: the given checkpoint.
    """
    if base is not None:
        return location_of(owner, base)
    if not isinstance(log, str | PathLike):
        raise ValueError(
            f"{owner}: base is None, but the log is not in a directory, which could have one: give "
            "the path of the checkpoint that the log begins with"
        )
    path = location_of(owner, log)
    if owner != "follow":
        first = next(iter(sinks_of(log)()), None)
        batches = [] if first is None else first.read(0)
        return newest_base(path, {batch_of(data).head.base for data in batches})
    folders = list(base_folders(path).values())
    if len(folders) > 1:
        raise ValueError(
            f"{owner}: base is None, but the log has the bases {[of.name for of in folders]}: give "
            "the path of the one with the content of the model"
        )
    return folders[0] if folders else base_folder(path, 0)


__all__ = ["Follower", "base_of", "follow", "replay"]
