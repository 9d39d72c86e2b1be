"""Recording of the changes of a model, which are copied between two training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_dynemb import ops
from torch_dynemb.changes.batch import DENSE, Pieces
from torch_dynemb.changes.changed_parts import changed_records, ids_now, logged_part
from torch_dynemb.changes.payloads import LoggedPart, LogRows, of_tables, of_tensors
from torch_dynemb.checkpoint.saving.dense_state import dense_source, dense_state
from torch_dynemb.delta_log.admission_changes import AdmissionChanges
from torch_dynemb.delta_log.program_state import of_state
from torch_dynemb.delta_log.published_ids import PublishedIds
from torch_dynemb.errors import HostMemoryError, NewBaseNeededError
from torch_dynemb.files.tensor_file import as_bytes
from torch_dynemb.parts.table_parts import TablePart, groups_of, parts_of
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table.changes import (
    ChangedIds,
    Changes,
    mark_changed,
    read_changes,
    reader_of,
    record_changes,
    stop_recording,
    take_changes,
)
from torch_dynemb.table.content import score_names
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.lookup import find
from torch_dynemb.table.tables import one_table
from torch_dynemb.table.undisturbed import Undisturbed

_CUSTOM = "custom"


class ChangedPart(NamedTuple):
    """Copied changes of a part of a table, on the CPU.

    Attributes:
        logged: description of the part as it is now.
        ids: int64 [n], new and changed ids.
        removed: int64 [m].
        records: records of a batch with these ids.
    """

    logged: LoggedPart
    ids: Tensor
    removed: Tensor
    records: list[Pieces]


class Changed(NamedTuple):
    """Copied changes of a model.

    Attributes:
        parts: changes of the tables.
        dense: changed tensors of the dense state, by name.
        state: record of the program's state; None for a log that cannot be resumed from.
    """

    parts: list[ChangedPart]
    dense: dict[str, Tensor]
    state: Pieces | None

    def records(self) -> list[Pieces]:
        """Make the records of a batch."""
        result = [of_tables([part.logged for part in self.parts])]
        for part in self.parts:
            result += part.records
        if self.dense:
            result.append(Pieces.of(DENSE, 0, of_tensors(self.dense)))
        return result if self.state is None else [*result, self.state]


class RecordedModel:
    """A model with changes that are recorded for a delta log.

    Args:
        model: any module with tables of this library.
        parts: its tables on this rank.
        name: name of the reader of their changes.
        optimizer_state: also copy the optimizer state of changed rows.
        dense: also copy the dense state, on the first rank.
        resume: copy everything that training resumes with: also all scores, and the changes of what
            waits for admission.
        rank: rank of this process.
        published: ids to copy; None: all.
        form: form of the copied rows; None: that of the tables.
        copies: copies of a commit in memory until it is written.

    Attributes:
        parts: tables of the model on this rank.
        optimizer_state, resume: see the arguments.

    Raises:
        TypeError: the dense state has an entry other than a whole tensor.
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
        resume: bool,
        rank: int,
        published: PublishedIds | None = None,
        form: LogRows | None = None,
        copies: int = 2,
    ) -> None:
        self._published, self._form, self._copies = published, form, copies
        self._model, self.parts, self._name = model, list(parts), name
        self.optimizer_state, self._dense, self._rank = optimizer_state, dense, rank
        self.resume = resume
        waiting = self.parts if resume else []
        self._waiting = [AdmissionChanges(part, k) for k, part in enumerate(waiting)]
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        # ids that the next publish must check, in addition to recorded changes
        self._owed = [none] * len(self.parts)
        self._dense_now()
        self._dense_before: dict[str, Tensor] = {}
        self._taken: Changed | None = None
        self._reading: Undisturbed | None = None  # the last one
        self._since = f"delta log {id(self)}"
        own = {_place_of(part) for part in self.parts}
        self._others = {of for part in parts_of(model) if (of := _place_of(part)) not in own}
        for group in groups_of(self.parts):
            record_changes(group.tables, name, scores=self._records_scores(group))

    def begin(self, *, saved: bool = False) -> None:
        """Start recording: followers know the present content of the model.

        Args:
            saved: whether the base of the log has the present counts of admission. Otherwise the
                next commit has all of them.
        """
        for of_part in self._waiting:
            of_part.begin() if saved else of_part.forget()
        for group in groups_of(self.parts):
            reader = record_changes(group.tables, self._name, scores=self._records_scores(group))
            changes = read_changes(group.tables, reader)
            take_changes(group.tables, reader, changes, self._since)
        self._dense_before = self._dense_now()

    def owe(self, owed: Sequence[Tensor], *, dense: bool) -> None:
        """Add ids that the next :meth:`changed` must check, and optionally the whole dense state.

        Args:
            owed: int64 [n] of each part; ids that the model lacks are reported as removed.
            dense: whether followers lack the dense state.
        """
        self._owed = [torch.cat(pair) for pair in zip(self._owed, owed, strict=True)]
        if dense:
            self._dense_before = {}

    def written(self) -> None:
        """Mark the result of :meth:`changed` as published."""
        self._taken = None

    def give_back(self) -> None:
        """Make the next :meth:`changed` return the unpublished changes again."""
        changed = self._taken
        if changed is None:
            return
        with defer_signals():
            self.owe([torch.cat([part.ids, part.removed]) for part in changed.parts], dense=False)
            for name in changed.dense:
                self._dense_before.pop(name, None)
            for of_part in self._waiting:
                of_part.forget()
            self._taken = None

    def stop(self) -> None:
        """Stop recording."""
        for group in groups_of(self.parts):
            stop_recording(group.tables, self._name)

    def read(self) -> list[Changes]:
        """Return the changes since the last published result, by group.

        Raises:
            RuntimeError: the tables or their content were replaced, or another thread changes them
                now. Nothing counts as published then.
        """
        self.give_back()
        groups = groups_of(self.parts)
        self._check_modules()
        self._reading = self.guard("DeltaLog.publish")
        with self._reading:
            changes = [self._changes_of(group) for group in groups]
            for part, owed in zip(self.parts, self._owed, strict=True):
                if owed.numel() > 0:
                    of_group = changes[groups.index(part.group)].tables
                    changed = of_group[part.table]
                    owed = owed.to(changed.ids.device)
                    ids = torch.cat([changed.ids, changed.removed, owed]).unique()
                    of_group[part.table] = ids_now(part, ids, ids)
        return changes

    def copied(self, changes: Sequence[Changes], state: Mapping[str, Any] | None) -> Changed:
        """Copy changes. Followers are assumed to get them, unless :meth:`give_back` is called.

        Args:
            changes: result of :meth:`read`.
            state: state of the program.

        Raises:
            TypeError: ``state`` has values that cannot be saved.
            InUseError: another thread changes the tables now. Nothing counts as published then.
            HostMemoryError: the commit does not fit into memory, likewise.
        """
        groups, reading = groups_of(self.parts), self._reading
        assert reading is not None
        of_program = of_state(state, self._rank) if self.resume else None
        try:
            with reading:
                planned = [
                    self._planned(number, changes[groups.index(part.group)].tables[part.table])
                    for number, part in enumerate(self.parts)
                ]
                self._check_memory(planned)
                of_parts = [self._copied(number, of) for number, of in enumerate(planned)]
                dense = self._dense_now() if self._dense else {}
        except BaseException:
            for of_part in self._waiting:
                of_part.forget()
            raise
        of_dense = {
            name: values
            for name, values in dense.items()
            if not _same(self._dense_before.get(name), values)
        }
        result = Changed(of_parts, of_dense, of_program)
        with defer_signals():
            for group, of_group in zip(groups, changes, strict=True):
                reader = reader_of(group.tables, self._name)
                assert reader is not None
                take_changes(group.tables, reader, of_group, self._since)
            self._owed = [owed[:0] for owed in self._owed]
            self._dense_before = dense
            if self._published is not None:
                self._published.taken()
            self._taken = result
            if reading.is_disturbed():  # while dirty bytes were cleared, which may have lost some
                for group, of_group in zip(groups, changes, strict=True):
                    mark_changed(group.tables, of_group)
        return result

    def guard(self, call: str) -> Undisturbed:
        """Guard a reading of the model against another thread that trains it.

        Args:
            call: prefix of the error.

        Raises:
            RuntimeError: another thread changes the tables now.
        """
        dense = dense_state(self._model).values() if self._dense else ()
        tensors = [value for value in dense if type(value) is Tensor]
        return Undisturbed(call, groups_of(self.parts), tensors)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the model has changed since :meth:`changed`."""
        if self._reading is not None:
            self._reading.check()

    def _check_modules(self) -> None:
        """Raise NewBaseNeededError unless the model has the tables that are recorded."""
        now = {_place_of(part): part.group for part in parts_of(self._model)}
        same = all(now.pop(_place_of(part), None) is part.group for part in self.parts)
        if not same or not now.keys() <= self._others:
            names = sorted({part.name for part in self.parts})
            raise NewBaseNeededError(
                f"DeltaLog: modules with tables were replaced, renamed, added or removed since the "
                f"log was attached to the model with {names}: save a checkpoint, and call "
                "DeltaLog.attach(model, base=...) with it",
                tables=names,
            )

    def _changes_of(self, group: TableGroup) -> Changes:
        reader = reader_of(group.tables, self._name)
        if reader is None or reader.since != self._since:
            raise NewBaseNeededError(
                f"DeltaLog: tables {group.names} or their content were replaced since "
                "the log was attached to the model (add_table, set_optimizer, a load): the "
                "changes are unknown. Save a checkpoint, and attach the log to the model again "
                "with it as the base",
                tables=group.names,
            )
        return read_changes(group.tables, reader)

    def _planned(self, number: int, changed: ChangedIds) -> ChangedPart:
        """Return the changes of a part with records that are not read yet."""
        part, state = self.parts[number], self.optimizer_state
        if self._published is not None:
            touched = torch.cat([changed.ids, changed.removed])
            split = self._published.split(number, touched)
            if split is not None:
                ids, removed = split
                tables = part.group.tables
                handles = find(tables, *one_table(tables, part.table, ids)).handles
                changed = ChangedIds(ids, handles, removed)
        records = changed_records(
            part, number, changed, state=state, scores=self.scores_of(part), form=self._form
        )
        return ChangedPart(
            logged_part(part, self._rank, number, changed, state=state),
            changed.ids.cpu(),
            changed.removed.cpu(),
            list(records),
        )

    def _check_memory(self, planned: Sequence[ChangedPart]) -> None:
        """Raise HostMemoryError if a commit does not fit into memory."""
        size = sum(record.bytes for part in planned for record in part.records)
        free = ops.available_memory()
        if self._copies * size > free:
            raise HostMemoryError(
                f"DeltaLog.publish: the commit has {size} bytes and takes {self._copies * size} "
                f"of memory until it is written, but {free} are free: nothing was published, and "
                "the next publish has these changes, too. Publish more often, on a machine with "
                "more memory, or save a new base and attach the log to it",
                tables=[part.logged.name for part in planned if part.records],
            )

    def _copied(self, number: int, planned: ChangedPart) -> ChangedPart:
        waiting = [of for part in self._waiting[number : number + 1] for of in part.records()]
        return planned._replace(records=[*(of.read() for of in planned.records), *waiting])

    def scores_of(self, part: TablePart) -> Sequence[str]:
        """Return the names of the scores that a log has of a table.

        Args:
            part: part of the model.
        """
        if self.resume:
            return score_names(part.group.tables, part.table)
        # scores given by a program, which lookups of followers cannot compute
        return [_CUSTOM] if _CUSTOM in part.config.policy.scores else []

    def _records_scores(self, group: TableGroup) -> bool:
        """Return whether changed scores are changes of a group."""
        return any(self.scores_of(part) for part in self.parts if part.group is group)

    def _dense_now(self) -> dict[str, Tensor]:
        """Copy the dense state, on the first rank."""
        if not self._dense:
            return {}
        source = dense_source("DeltaLog", dense_state(self._model), self._rank)
        pieces = [piece.name for piece in source.pieces if piece.sizes]
        odd = sorted({*pieces, *(source.values or {})})
        if odd:
            raise TypeError(
                f"DeltaLog: entries {odd} of the model's state dict are not whole tensors, which a "
                "delta log requires: give dense=False, and send them to followers in another way"
            )
        return {
            piece.name: piece.values.to("cpu", copy=True).contiguous() for piece in source.pieces
        }


def _same(before: Tensor | None, now: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    if before is None or before.dtype != now.dtype or before.shape != now.shape:
        return False
    return torch.equal(as_bytes(before.contiguous()), as_bytes(now.contiguous()))


def _place_of(part: TablePart) -> tuple[str, int, int, int]:
    return part.name, part.table, part.first_column, part.ids.begin


__all__ = ["Changed", "ChangedPart", "RecordedModel"]
