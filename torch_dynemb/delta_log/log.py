"""Publishing of the changes of training, for models that serve and for other trainers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch.distributed as dist
from torch import nn

from torch_dynemb.argument_checks import described, flag, integer
from torch_dynemb.changes.batch import rank_folder
from torch_dynemb.changes.payloads import LogRows
from torch_dynemb.checkpoint.loading.load import LoadReport
from torch_dynemb.checkpoint.saving.save import save
from torch_dynemb.delta_log.attaching import find_base
from torch_dynemb.delta_log.folding import load_commits
from torch_dynemb.delta_log.log_folder import base_folders, newest_base, remove_bases, sink_of
from torch_dynemb.delta_log.new_base import BaseSaves, Retention
from torch_dynemb.delta_log.own_log import OwnLog
from torch_dynemb.delta_log.published_ids import PublishedIds
from torch_dynemb.delta_log.publishing import (
    LogOptions,
    ProgramState,
    Publishing,
    attached,
    given_state,
)
from torch_dynemb.delta_log.reader import LogPosition, sinks_of
from torch_dynemb.delta_log.recorded import RecordedModel
from torch_dynemb.delta_log.sink import DeltaSink, LockingSink
from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.errors import ForkedProcessError, InUseError
from torch_dynemb.files.locations import Location, checked_location
from torch_dynemb.parts.table_parts import groups_of
from torch_dynemb.policy.keep import Keep
from torch_dynemb.process.forked import watch
from torch_dynemb.process.torch_modes import plain_torch


class DeltaLog:
    """Publisher of a model's changes during training: rows, removed ids, dense weights.

    A log begins with a checkpoint, its base. Each :meth:`publish` adds a commit with the changes
    since the one before. A copy of the base with all commits up to one applied has the rows of the
    model at that time. :func:`follow` applies them to models that serve, and to other trainers.

    A publish copies the changes between two training steps, and a thread writes the copies while
    training goes on. An error of the thread is raised by the next call, and the next publish
    includes the unwritten changes. If ranks share a model, each has its own log, and commits have
    one number on all ranks. They call all methods together.

    Args:
        log: directory or URL of the log, which ranks share, or a :class:`DeltaSink` of this rank.
        every_steps: number of calls after which :meth:`step` publishes.
        every_seconds: seconds after which :meth:`step` publishes. If ranks share the model, they
            ask the first rank in every step.
        optimizer_state: also publish the optimizer state of changed rows, for other trainers.
        dense: also publish the dense state.
        tables: names of the tables to publish, as in a checkpoint; default: all.
        keep: ids to publish: :class:`torch_dynemb.Top` or :class:`torch_dynemb.AtLeast`, for all
            tables, or a dict by table name. A commit removes ids that a rule no longer keeps, and
            ids that are past their ttl. Each commit scans the index. Bases are whole checkpoints;
            the first commit after a base removes its other ids. Default: all ids.
        rows: form of the published rows: ``"int8"``, with a scale for each row as
            :func:`torch_dynemb.freeze` makes them, or ``"fp16"``. Live tables of int8 take rows of
            int8 as they are; other followers get floats. Bases have the rows of the tables.
            Default: the dtype of each table.
        resume: publish everything that training needs to go on from a commit with :func:`resume`.
            That is also optimizer state, all scores, changed counts of admission, clocks, seeds,
            and the ``state`` of the program.
        retain: commits that :meth:`save` leaves before a new base: a number of them, or those of a
            time such as ``"1h"``. Default: those since the former base.
        process_group: ranks that share the model; default: all.

    Raises:
        TypeError, ValueError: a wrong argument.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1))
        >>> folder = tempfile.TemporaryDirectory()
        >>> log = td.delta_log.DeltaLog(folder.name + "/log", every_steps=1)
        >>> log.attach(bag)
        >>> bag(torch.tensor([[1, 2], [3, 1]])).sum().backward()
        >>> bag.optimizer.step()
        >>> log.step()
        1
        >>> log.close()
        >>> copy = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1))
        >>> td.delta_log.replay(folder.name + "/log", copy)
        1
        >>> copy.group.size(0)
        3
        >>> folder.cleanup()
    """

    def __init__(
        self,
        log: str | PathLike[str] | DeltaSink,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        optimizer_state: bool = False,
        dense: bool = True,
        tables: Collection[str] | None = None,
        keep: Keep | None = None,
        rows: LogRows | None = None,
        resume: bool = False,
        retain: int | str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._ranks, self._process_group = ranks_of(process_group), process_group
        self._options = LogOptions.of(
            every_steps=every_steps,
            every_seconds=every_seconds,
            optimizer_state=optimizer_state,
            dense=dense,
            tables=tables,
            keep=keep,
            resume=resume,
            rows=rows,
        )
        retention = Retention(retain)
        self._path: Location | None = None
        if isinstance(log, str | PathLike):
            self._path = checked_location("DeltaLog: log", log)
            log = sink_of(self._path / rank_folder(self._ranks.rank, self._ranks.size))
        elif not isinstance(log, DeltaSink):
            raise TypeError(
                f"DeltaLog: log is {described(log)}, expected a path, or a sink with append, read, "
                "truncate and drop_after"
            )
        self._own = OwnLog(log, self._ranks.rank, self._ranks.size)
        self._bases = BaseSaves(self._own, self._ranks, process_group, self._path, retention)
        self._publishing: Publishing | None = None
        self._steps, self._published_at = 0, 0.0
        self._one = threading.RLock()  # held by the thread in a call
        self.forked = False  # True in a child, which has neither the lock nor the writing thread
        watch(self)

    @property
    def sequence(self) -> int:
        """Number of the last commit, which a thread may still be writing; 0 if there is none."""
        return self._own.published

    @property
    def durable_sequence(self) -> int:
        """Number of the last commit that is known to be in the log; 0 if there is none.

        A commit of several ranks is known to be there from the next :meth:`flush` or
        :meth:`publish` on.
        """
        publishing = self._publishing
        return self._own.published if publishing is None else publishing.durable()

    # -- a model -------------------------------------------------------------------------------

    @plain_torch()
    def attach(
        self,
        model: nn.Module,
        *,
        base: str | PathLike[str] | None = None,
        state: ProgramState = None,
    ) -> None:
        """Record the changes of a model from now on. Call it between two training steps.

        Updates then set a dirty byte per row, so compiled code is compiled again, and CUDA graphs
        must be captured again.

        A log in a directory without a base gets one there, unless one is given. Otherwise the model
        is compared with the base and the commits since. The next publish has all differences: a
        trainer can resume from any checkpoint, and later content of the log is taken back.

        Args:
            model: any module with tables of this library and rows in memory.
            base: path of the checkpoint that the log begins with, or of a later one from
                :meth:`save`; default: the newest one in the directory of the log.
            state: as for :meth:`publish`; a base that is saved now has it.

        Raises:
            TypeError: ``model`` is not a module, or its dense state has entries other than whole
                tensors.
            ValueError: the base does not fit the log or the model, or is missing for a log outside
                a directory. Or the log has another number of ranks, or commits with another
                ``resume=``. Or ``tables`` or ``keep`` of the log names an unknown table, or a score
                that a table does not keep.
            FileNotFoundError: ``base`` is not a checkpoint.
            DamagedFileError: the log or the base is damaged.
            InUseError: the log has a writer, or another thread trains the model.
            RuntimeError: the log has a model already, rows lie in a store, or gradients are
                pending.
            OSError: the disk fails. In all cases nothing is recorded.
        """
        with self._alone("attach"):
            given = self._given("attach", state)

            def find(recorded: RecordedModel, published: PublishedIds | None) -> None:
                self._find_base(model, recorded, published, base, given)

            self._attach(model, find)

    def _resume(
        self, model: nn.Module, base: str | PathLike[str] | None, progress: bool | None
    ) -> LoadReport:
        """Load the last commit into a model, and attach the model; see :func:`resume`."""
        if not self._options.resume:
            raise ValueError(
                "delta_log.resume: the DeltaLog was constructed without resume=True, so its "
                "commits cannot be resumed from: give resume=True"
            )
        if self._path is None and (base is None or self._ranks.size > 1):
            raise ValueError(
                "delta_log.resume: the DeltaLog is not in a directory, which could have a base "
                "and the commits of all ranks: give resume(sinks, model, base=) the sinks of all "
                "ranks in its place, then attach the log with this base"
            )
        ranks, own = self._ranks, self._own
        reports: list[LoadReport] = []

        def find(recorded: RecordedModel, published: PublishedIds | None) -> None:
            path = base
            if path is None:
                log = self._path
                assert log is not None
                begun = ranks.run(lambda: own.sequence > 0 or bool(base_folders(log)))
                if not ranks.gather(begun)[0]:
                    self._find_base(model, recorded, published, None, None)
                    reports.append(LoadReport(own.base, {}, None, (), ()))
                    return
                path = str(newest_base(log, ranks.run(own.bases)))
            sinks = sinks_of(own.sink if self._path is None else str(self._path))
            report = load_commits(ranks, path, sinks, model, recorded.parts, progress)
            own.base = report.uuid
            own.base_sequence = ranks.run(lambda: own.sequence_of(report.uuid))
            ranks.run(recorded.begin)
            reports.append(report)

        with self._alone("attach"):
            self._attach(model, find)
        return reports[0]

    def _find_base(
        self,
        model: nn.Module,
        recorded: RecordedModel,
        published: PublishedIds | None,
        base: str | PathLike[str] | None,
        state: Mapping[str, Any] | None,
    ) -> None:
        ranks = self._ranks

        def save_base(path: Location) -> None:
            save(str(path), model, state=state, process_group=self._process_group)

        reading = ranks.run(lambda: recorded.guard("DeltaLog.attach"))
        find_base(self._own, ranks, recorded, log=self._path, base=base, save=save_base)
        if published is not None:
            published.begin()
        ranks.run(reading.check)

    def _attach(
        self,
        model: nn.Module,
        find: Callable[[RecordedModel, PublishedIds | None], None],
    ) -> None:
        if self._publishing is not None:
            raise RuntimeError("DeltaLog.attach: the log already has a model: close() it first")
        self._publishing = attached(self._own, self._ranks, self._options, self._path, model, find)
        self._steps, self._published_at = 0, time.monotonic()

    # -- publishing ----------------------------------------------------------------------------

    def step(self, step: int | None = None, *, state: ProgramState = None) -> int | None:
        """Publish if it is time. A training loop calls it after ``optimizer.step()``.

        Args:
            step: training step; default: the number of steps of the tables.
            state: as for :meth:`publish`. A function is called only if this call publishes.

        Returns:
            Number of the commit; None if it is not time yet.

        Raises:
            Exception: as :meth:`publish`.
        """
        publishing, options = self._attached("step"), self._options
        self._steps += 1
        due = options.every_steps is not None and self._steps % options.every_steps == 0
        if options.every_seconds is not None:
            passed = time.monotonic() - self._published_at >= options.every_seconds
            due |= self._ranks.gather(passed)[0]
        if not due and not (publishing.failed() and self._ranks.size == 1):
            return None
        return self.publish(step, state=state)

    @plain_torch()
    def publish(self, step: int | None = None, *, state: ProgramState = None) -> int:
        """Add a commit with the changes. Call it between two training steps.

        The changes are copied before it returns, and a thread writes them. A publish waits for the
        one before.

        Args:
            step: training step; default: the number of steps of the tables.
            state: other values that the program needs to resume, as in
                :func:`torch_dynemb.checkpoint.save`, for a log with ``resume=True``. Examples are
                the state of a dense optimizer and the position of the reader. Or a function that
                returns them, which all ranks call.

        Returns:
            Number of the commit.

        Raises:
            TypeError, ValueError: ``step`` is not an int, or less than 0; or ``state`` has other
                values, or the log is without ``resume=True``.
            RuntimeError: the log has no model, or gradients are pending.
            InUseError: another thread trains the model or calls the log. The next publish includes
                these changes.
            NewBaseNeededError: the tables or their content were replaced.
            HostMemoryError: the commit does not fit into memory; the next publish includes these
                changes, too.
            Exception: error of the thread that wrote the commit before, as :meth:`flush`.
        """
        with self._alone("publish"):
            return self._publish(step, self._given("publish", state))

    def _publish(self, step: int | None, state: Mapping[str, Any] | None) -> int:
        publishing = self._attached("publish")
        if step is None:
            groups = groups_of(publishing.recorded.parts)
            step = max((group.steps for group in groups), default=self._steps)
        step = integer("DeltaLog.publish: step", step, least=0, what="int or None")
        publishing.flush()
        self._bases.take(self.truncate)
        sequence = publishing.publish(step, state)
        self._published_at = time.monotonic()
        self._bases.retention.published(sequence)
        return sequence

    @plain_torch()
    def flush(self) -> None:
        """Wait until the last commit is in the log.

        Raises:
            Exception: error of the writing thread. The next publish includes the changes of that
                commit. If the store has the commit all the same, no error is raised: an answer was
                lost.
        """
        with self._alone("flush"):
            self._attached("flush").flush()

    def position(self) -> LogPosition:
        """Return the position of the model in the log, once the last commit is written.

        :func:`torch_dynemb.serving.export` takes it as its ``base``.

        Raises:
            RuntimeError: the log has no model.
            Exception: as :meth:`flush`.
        """
        publishing, own = self._attached("position"), self._own
        self.flush()
        sequence = None if own.sequence == 0 else own.sequence
        return LogPosition(own.base, sequence, own.chain, own.rank, dict(publishing.tables))

    def _given(self, call: str, state: ProgramState) -> Mapping[str, Any] | None:
        """Return the values of ``state=``. All ranks call it."""
        return self._ranks.run(lambda: given_state(call, state, resume=self._options.resume))

    def save(
        self,
        path: str | PathLike[str] | None = None,
        *,
        state: ProgramState = None,
        asynchronous: bool = False,
    ) -> int:
        """Publish, and save a checkpoint as base for new followers.

        Commits before the former base are dropped, or those that ``retain=`` names; later ones stay
        for followers that are behind. :meth:`truncate` drops more.

        Args:
            path: path of the checkpoint; default: a folder in the directory of the log, beside the
                former base.
            state: as for :meth:`publish`; the checkpoint has it, too.
            asynchronous: save in a thread while training and publishes go on; see
                :func:`torch_dynemb.checkpoint.save`. The first publish after its end makes the
                checkpoint the base, and the one after that drops commits.

        Returns:
            Number of the last commit that the checkpoint includes.

        Raises:
            ValueError: ``path`` is None, and the log is not in a directory.
            Exception: as :meth:`publish` and :func:`torch_dynemb.checkpoint.save`; the log keeps
                its former base. An error of the thread is raised by the next publish, or by the
                next step of an optimizer.
        """
        with self._alone("save"):
            flag("DeltaLog.save: asynchronous", asynchronous)
            given = self._given("save", state)
            publishing = self._attached("save")

            def publish() -> int:
                number = self._publish(None, given)
                publishing.flush()
                return number

            sequence = self._bases.save(publishing, path, given, asynchronous, publish)
            if not asynchronous:
                publish()  # names the new base
                self._bases.take(self.truncate)
            return sequence

    def truncate(self, before: int) -> None:
        """Drop commits at the beginning. A directory drops whole files only.

        Followers that have not read them, or begin with an earlier base, need a newer base.

        Args:
            before: number of the first commit that stays.

        Raises:
            TypeError, ValueError: ``before`` is not an int, or later than the base of the log, with
                which followers begin.
            OSError: the sink fails.
        """
        most = self._own.base_sequence + 1
        integer("DeltaLog.truncate: before", before, least=0, most=most)
        self._ranks.run(lambda: self._own.sink.truncate(before))

    def rollback(self, sequence: int) -> None:
        """Remove the commits after a given one, from a log without a model.

        Followers that have read them need a base. Load a checkpoint into the model and
        :func:`replay` the log, or :meth:`attach` any model: the next commit has the differences.

        Args:
            sequence: number of the last commit that stays; 0 removes all.

        Raises:
            TypeError, ValueError: ``sequence`` is not an int, or the log lacks that commit.
            InUseError: the log has a writer.
            RuntimeError: the log has a model.
            OSError: the sink fails.
        """
        sequence = integer("DeltaLog.rollback: sequence", sequence, least=0)
        if self._publishing is not None:
            raise RuntimeError(
                "DeltaLog.rollback: the log has a model, and its changes would be lost: close() "
                "the log, roll back, load the model, and attach it again"
            )

        def drop() -> None:
            try:
                # not begin_writing(): the removed commits may be damaged
                if isinstance(self._own.sink, LockingSink):
                    self._own.sink.lock()
                found = next(self._own.batches(max(1, sequence)), None)
                first = None if found is None else found.head.sequence
                if first != max(1, sequence) and (first is not None or sequence > 0):
                    raise ValueError(
                        f"DeltaLog.rollback: sequence is {sequence}, but the log has no such commit"
                    )
                self._own.drop_after(sequence)
            finally:
                self._own.stop_writing()

        self._ranks.run(drop)
        self._own.published, log = sequence, self._path
        if log is not None:
            self._ranks.on_first(lambda: remove_bases(log, after=sequence))

    def close(self) -> None:
        """Wait for the last commit, and stop being the writer of the log.

        Raises:
            Exception: error of the writing thread; the log is closed anyway.
            KeyboardInterrupt: the thread goes on, and the log stays open: call it again.
        """
        publishing = self._publishing
        if publishing is None:
            return
        if self.forked:
            self._publishing = None
            return
        with self._alone("close"):
            try:
                if publishing.pending():  # an error that was raised is not raised again
                    self.flush()
            finally:
                if not publishing.writing():  # else another writer would write beside the thread
                    publishing.recorded.stop()
                    self._publishing = None
                    self._bases.new = None
                    self._own.stop_writing()

    def __enter__(self) -> DeltaLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _alone(self, method: str) -> Iterator[None]:
        """Raise InUseError if another thread is calling the log."""
        if self.forked:
            yield  # that thread is not in this process
            return
        if not self._one.acquire(blocking=False):
            raise InUseError(
                f"DeltaLog.{method}: another thread is calling the log: let one thread publish, "
                "the one that trains",
                path=self._path,
            )
        try:
            yield
        finally:
            self._one.release()

    def _attached(self, method: str) -> Publishing:
        if self._publishing is None:
            raise RuntimeError(f"DeltaLog.{method}: the log has no model: call attach(model) first")
        if self.forked:
            raise ForkedProcessError(
                f"DeltaLog.{method}: this process is a fork of the one that publishes: publish "
                "there, or attach the log to a model of this process, in another directory",
                path=self._path,
            )
        return self._publishing


__all__ = ["DeltaLog"]
