"""A model that is attached to a delta log: options, recorded changes, and commits of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from torch_dynemb.argument_checks import described, flag, integer, number
from torch_dynemb.changes.changed_parts import combine_columns
from torch_dynemb.changes.payloads import LOG_ROWS, LogRows
from torch_dynemb.checkpoint.saving.save import check_saveable
from torch_dynemb.delta_log.attaching import checked_parts
from torch_dynemb.delta_log.own_log import OwnLog
from torch_dynemb.delta_log.published_ids import Filter, PublishedIds
from torch_dynemb.delta_log.recorded import Changed, RecordedModel
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.errors import NewBaseNeededError
from torch_dynemb.files.locations import Location, Url
from torch_dynemb.parts.table_parts import PACKED, TablePart, end_steps, groups_of
from torch_dynemb.policy.keep import Keep
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.process.torch_modes import one_thread, plain_torch
from torch_dynemb.process.waits import wait_until_set

# what a program gives as ``state=``, or a function that returns it
ProgramState = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None


class LogOptions(NamedTuple):
    """Options of a log; see :class:`DeltaLog`.

    Attributes:
        every_steps: steps between commits; None: not by steps.
        every_seconds: seconds between commits; None: not by the clock.
        optimizer_state: whether commits have the optimizer state of rows.
        dense: whether commits have the dense state.
        resume: whether training can resume from commits.
        filter: tables and ids to publish.
        rows: form of the rows; None: that of the tables.
    """

    every_steps: int | None
    every_seconds: float | None
    optimizer_state: bool
    dense: bool
    resume: bool
    filter: Filter
    rows: LogRows | None

    @staticmethod
    def of(
        *,
        every_steps: int | None,
        every_seconds: float | None,
        optimizer_state: bool,
        dense: bool,
        tables: Collection[str] | None,
        keep: Keep | None,
        resume: bool,
        rows: LogRows | None,
    ) -> LogOptions:
        """Check the arguments of a log.

        Raises:
            TypeError, ValueError: one of them is wrong, or two exclude each other.
        """
        chosen = Filter.of(tables, keep)
        if every_steps is not None:
            integer("DeltaLog: every_steps", every_steps, least=1, what="int or None")
        if every_seconds is not None and not number("DeltaLog: every_seconds", every_seconds) > 0:
            raise ValueError(f"DeltaLog: every_seconds is {every_seconds}, expected more than 0")
        flag("DeltaLog: resume", resume)
        state = flag("DeltaLog: optimizer_state", optimizer_state) or resume
        flag("DeltaLog: dense", dense)
        if resume and not dense:
            raise ValueError(
                "DeltaLog: resume is True and dense is False, but training goes on with the dense "
                "state, too: leave dense out"
            )
        if resume and chosen.is_partial:
            partial = f"tables is {tables!r}" if keep is None else f"keep is {keep!r}"
            raise ValueError(
                f"DeltaLog: resume is True and {partial}, but training goes on with all rows: give "
                "followers a log of their own"
            )
        if rows is not None and rows not in LOG_ROWS:
            raise ValueError(f"DeltaLog: rows is {rows!r}, expected None or one of {LOG_ROWS}")
        if resume and rows is not None:
            raise ValueError(
                f"DeltaLog: resume is True and rows is {rows!r}, but training goes on with the "
                "rows as they are: give followers a log of their own"
            )
        return LogOptions(every_steps, every_seconds, state, dense, resume, chosen, rows)


def given_state(call: str, state: ProgramState, *, resume: bool) -> Mapping[str, Any] | None:
    """Return the values of ``state=``.

    Args:
        call: method of the log, for errors.
        state: the argument.
        resume: whether training can resume from the log.

    Raises:
        TypeError: it is not a dict.
        ValueError: it is given to a log without ``resume=True``.
    """
    if state is None:
        return None
    if not resume:
        raise ValueError(
            f"DeltaLog.{call}: state is given, but the log was constructed without "
            "resume=True, so its commits have none: give DeltaLog(resume=True)"
        )
    given = state() if callable(state) else state
    if not isinstance(given, Mapping):
        raise TypeError(
            f"DeltaLog.{call}: state is {described(given)}, expected a dict, or a function "
            "that returns one"
        )
    return given


def attached(
    own: OwnLog,
    ranks: Ranks,
    options: LogOptions,
    path: Location | None,
    model: nn.Module,
    find_base: Callable[[RecordedModel, PublishedIds | None], None],
) -> Publishing:
    """Take a log as its writer, and record the changes of a model. All ranks call it.

    Args:
        own: log of this rank.
        ranks: ranks that share the model.
        options: options of the log.
        path: directory of the log; None if it is elsewhere.
        model: model to publish.
        find_base: finds the base of the log.

    Raises:
        Exception: as :meth:`DeltaLog.attach`. Nothing is recorded then.
    """
    parts_here, columns, split = checked_parts(
        ranks, model, path, optimizer_state=options.optimizer_state, resume=options.resume
    )
    ranks.run(lambda: _check_form(parts_here, options.rows))
    parts = ranks.run(lambda: options.filter.chosen(parts_here, columns))
    recorded, published = None, None
    try:
        ranks.run(own.begin_writing)
        ends = ranks.gather(own.sequence)
        own.published = min(ends)
        if own.published < max(ends) - 1:  # ranks publish together, so a log has lost its end
            raise NewBaseNeededError(
                f"DeltaLog.attach: the log of rank {ends.index(own.published)} ends with commit "
                f"{own.published}, but others go on to {max(ends)}: restore it, call "
                f"rollback({own.published}), or publish to a new directory"
            )
        if own.published < max(ends):  # some ranks lack this commit, so no follower has read it
            ranks.run(lambda: own.drop_after(own.published))
        end_steps(parts)
        if options.filter.keep is not None:
            published = PublishedIds(parts, options.filter.keep, ranks)
        recorded = ranks.run(
            lambda: RecordedModel(
                model,
                parts,
                name=f"delta log {path or id(own.sink)}",
                optimizer_state=options.optimizer_state,
                dense=options.dense,
                resume=options.resume,
                rank=ranks.rank,
                published=published,
                form=options.rows,
                copies=3 if isinstance(path, Url) else 2,  # a store gets one that it may keep
            )
        )
        find_base(recorded, published)
    except BaseException:
        if recorded is not None:
            recorded.stop()
        own.stop_writing()
        raise
    return Publishing(own, ranks, model, recorded, published, columns, split)


def _check_form(parts: Sequence[TablePart], form: LogRows | None) -> None:
    """Raise ValueError if rows of a table cannot be published in a form."""
    packed = [part.name for part in parts if part.dtype == PACKED]
    if form is not None and packed:
        raise ValueError(
            f"DeltaLog.attach: rows is {form!r}, but tables {packed} are trained with rows of 8 "
            "bits, which are published as they are: leave rows out"
        )


class Writing:
    """A thread that writes one batch.

    Args:
        log: log that gets the batch.
        changed: changes in the batch.
        step: training step.
    """

    def __init__(self, log: OwnLog, changed: Changed, step: int) -> None:
        self._error: BaseException | None = None
        self._ended = threading.Event()

        @plain_torch()
        def write() -> None:
            try:
                log.append(changed, step)
            except BaseException as error:
                # without the frames, which keep the copies alive
                self._error = error.with_traceback(None)
            finally:
                self._ended.set()

        # not a daemon: a program waits at exit for its published commits
        threading.Thread(target=write, name="delta log", daemon=False).start()

    def ended(self) -> bool:
        """Return whether it has ended, with or without an error."""
        return self._ended.is_set()

    def failed(self) -> bool:
        """Return whether it has ended with an error."""
        return self.ended() and self._error is not None

    def wait(self) -> None:
        """Wait until it has ended.

        Raises:
            Exception: error of the thread.
        """
        wait_until_set(self._ended)
        if self._error is not None:
            raise self._error


class Publishing:
    """Publisher of an attached model, with a thread that writes commits.

    Args:
        own: log of this rank.
        ranks: ranks that share the model.
        model: the model.
        recorded: its recorded changes.
        published: ids that followers have; None: all.
        tables: columns of its tables by name, over all ranks.
        split: whether ranks share the columns of a table.
    """

    def __init__(
        self,
        own: OwnLog,
        ranks: Ranks,
        model: nn.Module,
        recorded: RecordedModel,
        published: PublishedIds | None,
        tables: dict[str, int],
        split: bool,
    ) -> None:
        self._own, self._ranks = own, ranks
        self.model, self.recorded = model, recorded
        self.published, self.tables = published, tables
        self._split = split
        self._writing: Writing | None = None
        self._unsettled = False  # the log may have a commit that has failed

    def failed(self) -> bool:
        """Return whether the thread has ended with an error."""
        return self._writing is not None and self._writing.failed()

    def pending(self) -> bool:
        """Return whether a commit was published that :meth:`flush` has not waited for."""
        return self._writing is not None

    def writing(self) -> bool:
        """Return whether the thread is writing a commit."""
        return self._writing is not None and not self._writing.ended()

    def durable(self) -> int:
        """Return the number of the last commit that is known to be in the log."""
        if self._ranks.size == 1:
            return self._own.sequence
        return self._own.published - self.pending()

    def publish(self, step: int, state: Mapping[str, Any] | None) -> int:
        """Copy the changes, and start the thread that writes them. The last commit is written.

        Args:
            step: training step.
            state: see :meth:`DeltaLog.publish`.

        Returns:
            Number of the commit.
        """
        recorded, parts = self.recorded, self.recorded.parts
        try:
            self._ranks.run(self._check_between_steps)
            end_steps(parts)
            if self.published is not None:
                with one_thread():
                    self.published.choose()
            changes = self._ranks.run(recorded.read)  # passes over all ids, on all threads
            with one_thread():
                if self._split:
                    combine_columns(self._ranks, parts, groups_of(parts), changes)
                changed = self._ranks.run(lambda: recorded.copied(changes, state))
            with defer_signals():
                self._writing = Writing(self._own, changed, step)
                self._own.published += 1
        except BaseException:
            recorded.give_back()
            raise
        return self._own.published

    def flush(self) -> None:
        """Wait until the last commit is in the log; see :meth:`DeltaLog.flush`."""
        writing = self._writing
        if writing is None:
            if self._unsettled:
                self._settle()
            return
        try:
            self._ranks.run(writing.wait)
        except Exception as error:
            with defer_signals():
                self._writing = None
                self._own.published -= 1
                self._unsettled = True  # also if this rank has written it
                # published again with the next commit, whether or not the log has them
                self.recorded.give_back()
            try:
                if self._settle():
                    return
            except Exception:  # the next call looks again
                if isinstance(error, FileExistsError):  # perhaps of another writer
                    raise
                raise error from None
            raise
        self._writing = None
        self.recorded.written()

    def _check_between_steps(self) -> None:
        for group in groups_of(self.recorded.parts):
            check_saveable("DeltaLog.publish", group)

    def _settle(self) -> bool:
        """Look up a failed commit: it stays if all ranks have it, as a follower may have read it.

        Returns:
            Whether the log has the commit that was sent last.
        """
        own, ranks = self._own, self._ranks
        of_ranks = ranks.gather(ranks.run(own.sent_batch))
        sent = of_ranks[0] if len(set(of_ranks)) == 1 else None
        ranks.run(lambda: own.settle(sent))
        own.published = own.sequence
        self._unsettled = False
        return sent is not None and own.was_sent_last(sent)


__all__ = [
    "LogOptions",
    "ProgramState",
    "Publishing",
    "attached",
    "given_state",
]
