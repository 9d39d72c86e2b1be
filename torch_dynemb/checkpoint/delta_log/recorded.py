"""What a model has changed since it was asked last: copies, taken between two training steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_dynemb.checkpoint.delta_log.batch import DENSE, Pieces
from torch_dynemb.checkpoint.delta_log.changed_parts import logged_part, removed_records
from torch_dynemb.checkpoint.delta_log.payloads import LoggedPart, of_rows, of_tables, of_tensors
from torch_dynemb.checkpoint.parts import TablePart, groups_of
from torch_dynemb.checkpoint.saving.rest import dense_source, dense_state
from torch_dynemb.errors import NewBaseNeededError
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table.changes import (
    ChangedIds,
    ChangedRows,
    Changes,
    copy_rows,
    mark_changed,
    read_changes,
    reader_of,
    record_changes,
    stop_recording,
    take_changes,
)
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.lookup import find
from torch_dynemb.table.tables import one_table
from torch_dynemb.table.undisturbed import Undisturbed

_CUSTOM = "custom"


class ChangedPart(NamedTuple):
    """What has changed in a part of a table; on the CPU.

    Attributes:
        logged: the part as it is now.
        rows: ids that are new, or have changed.
        removed: int64 [m].
    """

    logged: LoggedPart
    rows: ChangedRows
    removed: Tensor


class Changed(NamedTuple):
    """What has changed in a model.

    Attributes:
        parts: of the tables.
        dense: tensors that have changed, by name.
    """

    parts: list[ChangedPart]
    dense: dict[str, Tensor]

    def records(self) -> list[Pieces]:
        """What a batch has of them."""
        result = [of_tables([part.logged for part in self.parts])]
        for number, part in enumerate(self.parts):
            result += removed_records(number, part.removed)
            if part.rows.ids.numel() > 0:
                result.append(of_rows(number, part.rows))
        if self.dense:
            result.append(Pieces.of(DENSE, 0, of_tensors(self.dense)))
        return result


class RecordedModel:
    """A model whose changes are recorded for a delta log.

    Args:
        model: any module with tables of this library.
        parts: its tables on this rank.
        name: of the reader of their changes.
        optimizer_state: copy that of changed rows, too.
        dense: the dense part, too; on the first rank.
        rank: of this process.

    Attributes:
        parts: tables of the model on this rank.
        optimizer_state: see the argument.

    Raises:
        TypeError: the dense part has an entry that is no whole tensor.
        RuntimeError: rows lie in a store, or the tables have eight readers.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[TablePart],
        *,
        name: str,
        optimizer_state: bool,
        dense: bool,
        rank: int,
    ) -> None:
        self._model, self.parts, self._name = model, list(parts), name
        self.optimizer_state, self._dense, self._rank = optimizer_state, dense, rank
        none = torch.empty(0, dtype=torch.int64)
        # ids that the next publish has to look at, whatever was recorded
        self._owed = [none] * len(self.parts)
        self._dense_now()
        self._dense_before: dict[str, Tensor] = {}
        self._taken: Changed | None = None
        self._reading: Undisturbed | None = None  # the last one
        self._since = f"delta log {id(self)}"
        for group in groups_of(self.parts):
            record_changes(group.tables, name, scores=_keeps_custom(group))

    def begin(self) -> None:
        """From now on: what the model holds now is known to those who follow."""
        for group in groups_of(self.parts):
            reader = record_changes(group.tables, self._name, scores=_keeps_custom(group))
            changes = read_changes(group.tables, reader)
            take_changes(group.tables, reader, changes, self._since)
        self._dense_before = self._dense_now()

    def owe(self, owed: Sequence[Tensor], *, dense: bool) -> None:
        """Has the next :meth:`changed` look at ids, and at all of the dense part, too.

        Args:
            owed: int64 [n] of each part; those that are not there will be said to be gone.
            dense: whether the dense part is not known to those who follow.
        """
        self._owed = [torch.cat(pair) for pair in zip(self._owed, owed, strict=True)]
        if dense:
            self._dense_before = {}

    def written(self) -> None:
        """What :meth:`changed` has given is with those who follow."""
        self._taken = None

    def give_back(self) -> None:
        """Has the next :meth:`changed` give again what it has given, and what was not written."""
        changed = self._taken
        if changed is None:
            return
        with defer_signals():
            self.owe(
                [torch.cat([part.rows.ids, part.removed]) for part in changed.parts], dense=False
            )
            for name in changed.dense:
                self._dense_before.pop(name, None)
            self._taken = None

    def stop(self) -> None:
        """Nothing is recorded any more."""
        for group in groups_of(self.parts):
            stop_recording(group.tables, self._name)

    def changed(self) -> Changed:
        """Copies of what has changed since :meth:`changed` gave what was :meth:`written`.

        What it gives is known from now on, unless it is given back.

        Raises:
            RuntimeError: others have taken the place of the tables, or of what they hold; or
                another thread changes them meanwhile. Nothing counts as known then.
        """
        self.give_back()
        groups = groups_of(self.parts)
        reading = self.guard("DeltaLog.publish")
        with reading:
            changes = [self._changes_of(group) for group in groups]
            of_parts = []
            for number, (part, owed) in enumerate(zip(self.parts, self._owed, strict=True)):
                of_part = next(k for k, group in enumerate(groups) if group is part.group)
                of_parts.append(self._copied(number, changes[of_part].tables[part.table], owed))
            dense = self._dense_now() if self._dense else {}
        of_dense = {
            name: values
            for name, values in dense.items()
            if not _same(self._dense_before.get(name), values)
        }
        result = Changed(of_parts, of_dense)
        with defer_signals():
            for group, of_group in zip(groups, changes, strict=True):
                reader = reader_of(group.tables, self._name)
                assert reader is not None
                take_changes(group.tables, reader, of_group, self._since)
            self._owed = [owed[:0] for owed in self._owed]
            self._dense_before = dense
            self._taken, self._reading = result, reading
            if reading.is_disturbed():  # while bytes were cleared, which may have lost some
                for group, of_group in zip(groups, changes, strict=True):
                    mark_changed(group.tables, of_group)
        return result

    def guard(self, call: str) -> Undisturbed:
        """What refuses a reading of the model beside another thread that trains it.

        Args:
            call: begins the error.

        Raises:
            RuntimeError: another thread changes the tables now.
        """
        dense = dense_state(self._model).values() if self._dense else ()
        tensors = [value for value in dense if type(value) is Tensor]
        return Undisturbed(call, groups_of(self.parts), tensors)

    def check_unchanged(self) -> None:
        """Raises RuntimeError where the model has changed since :meth:`changed`."""
        if self._reading is not None:
            self._reading.check()

    def _changes_of(self, group: TableGroup) -> Changes:
        reader = reader_of(group.tables, self._name)
        if reader is None or reader.since != self._since:
            raise NewBaseNeededError(
                f"DeltaLog: tables {group.names} have been replaced, or what they hold was, since "
                "the log was attached to the model (add_table, set_optimizer, a load): what has "
                "changed is not known. Save a checkpoint, and attach the log to the model again "
                "with it as the base",
                tables=group.names,
            )
        return read_changes(group.tables, reader)

    def _copied(self, number: int, changed: ChangedIds, owed: Tensor) -> ChangedPart:
        part, state = self.parts[number], self.optimizer_state
        tables = part.group.tables
        if owed.numel() > 0:
            ids = torch.cat([changed.ids, changed.removed, owed.to(changed.ids.device)]).unique()
            handles = find(tables, *one_table(tables, part.table, ids)).handles
            here = handles >= 0
            changed = ChangedIds(ids[here], handles[here], ids[~here])
        # scores that a program gives, which no lookup of followers does
        scores = [_CUSTOM] if _CUSTOM in part.config.policy.scores else []
        return ChangedPart(
            logged_part(part, self._rank, number, changed, state=state),
            copy_rows(tables, part.table, changed, state=state, scores=scores),
            changed.removed.cpu(),
        )

    def _dense_now(self) -> dict[str, Tensor]:
        """Copies of the dense part; on the first rank."""
        if not self._dense:
            return {}
        source = dense_source("DeltaLog", self._model, self._rank)
        pieces = [piece.name for piece in source.pieces if piece.sizes]
        odd = sorted({*pieces, *(source.values or {})})
        if odd:
            raise TypeError(
                f"DeltaLog: entries {odd} of the model's state dict are no whole tensors, which a "
                "delta log does not have: give dense=False, and bring them to followers otherwise"
            )
        return {
            piece.name: piece.values.to("cpu", copy=True).contiguous() for piece in source.pieces
        }


def _keeps_custom(group: TableGroup) -> bool:
    """Whether followers need scores: those that a program gives, which no lookup of theirs does."""
    return any(_CUSTOM in table.policy.scores for table in group.config.tables)


def _same(before: Tensor | None, now: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if before is None or before.dtype != now.dtype or before.shape != now.shape:
        return False
    if now.numel() == 0:
        return True
    return torch.equal(before.reshape(-1).view(torch.uint8), now.reshape(-1).view(torch.uint8))


__all__ = ["Changed", "ChangedPart", "RecordedModel"]
