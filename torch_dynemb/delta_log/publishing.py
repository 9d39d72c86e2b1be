"""A model that is attached to a delta log: its recorded changes, and the commits of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from torch_dynemb.changes.changed_parts import combine_columns
from torch_dynemb.changes.row_forms import LogRows
from torch_dynemb.checkpoint.saving.save import check_saveable
from torch_dynemb.delta_log.attaching import checked_parts
from torch_dynemb.delta_log.options import LogOptions
from torch_dynemb.delta_log.own_log import OwnLog, Writing
from torch_dynemb.delta_log.published_ids import PublishedIds
from torch_dynemb.delta_log.recorded import RecordedModel
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.errors import NewBaseNeededError
from torch_dynemb.files.locations import Location, Url
from torch_dynemb.parts.table_parts import PACKED, TablePart, end_steps, groups_of
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.process.one_thread import one_thread


class AttachedModel(NamedTuple):
    """A model with recorded changes.

    Attributes:
        model: the model.
        recorded: its recorded changes.
        published: ids that followers have; None: all.
        tables: columns of its tables by name, over all ranks.
        split: whether ranks share the columns of a table.
    """

    model: nn.Module
    recorded: RecordedModel
    published: PublishedIds | None
    tables: dict[str, int]
    split: bool


def attached(
    own: OwnLog,
    ranks: Ranks,
    options: LogOptions,
    path: Location | None,
    model: nn.Module,
    find_base: Callable[[RecordedModel, PublishedIds | None], None],
) -> AttachedModel:
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
    return AttachedModel(model, recorded, published, columns, split)


def _check_form(parts: Sequence[TablePart], form: LogRows | None) -> None:
    """Raise ValueError if rows of a table cannot be published in a form."""
    packed = [part.name for part in parts if part.dtype == PACKED]
    if form is not None and packed:
        raise ValueError(
            f"DeltaLog.attach: rows is {form!r}, but tables {packed} are trained with rows of 8 "
            "bits, which are published as they are: leave rows out"
        )


class Publishing:
    """Publisher of an attached model, with a thread that writes commits.

    Args:
        own: log of this rank.
        ranks: ranks that share the model.
        attached: the model.

    Attributes:
        model, recorded, published, tables: see :class:`AttachedModel`.
    """

    def __init__(self, own: OwnLog, ranks: Ranks, attached: AttachedModel) -> None:
        self._own, self._ranks = own, ranks
        self.model, self.recorded = attached.model, attached.recorded
        self.published, self.tables = attached.published, attached.tables
        self._split = attached.split
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


__all__ = ["AttachedModel", "Publishing", "attached"]
