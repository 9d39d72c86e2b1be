"""Loading of the last commit of a log: its base and the commits since then, as one load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from torch_dynemb.changes.batch import (
    CHANGED_CELLS,
    CHANGED_COUNTS,
    COUNTS,
    SKETCH,
    STATE,
    TABLES,
    Batch,
    Record,
)
from torch_dynemb.changes.commits import (
    TableDelta,
    checked_counts,
    checked_ids,
    checked_sketch,
    commit_of,
)
from torch_dynemb.changes.payloads import LoggedPart, tables_of, tensors_of
from torch_dynemb.checkpoint.loading.later import LaterChanges, LaterTable, shards_of
from torch_dynemb.checkpoint.loading.load import LoadReport, load_parts
from torch_dynemb.checkpoint.manifest.file import check_full, read_manifest
from torch_dynemb.checkpoint.manifest.records import Manifest
from torch_dynemb.checkpoint.reading.reader import Checkpoint
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.checkpoint.saving.dense_state import dense_state
from torch_dynemb.checkpoint.saving.handle import check_none_running
from torch_dynemb.checkpoint.saving.increments import count_from
from torch_dynemb.checkpoint.saving.save import check_saveable
from torch_dynemb.delta_log.program_state import decoded_state
from torch_dynemb.delta_log.reader import LogReader
from torch_dynemb.delta_log.sink import DeltaSink
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.errors import DamagedFileError
from torch_dynemb.files.locations import Location, checked_location
from torch_dynemb.parts.saved_checks import check_parts
from torch_dynemb.parts.saved_tables import SavedTable
from torch_dynemb.parts.table_parts import TablePart, groups_of
from torch_dynemb.parts.whole_tables import together
from torch_dynemb.policy.admission import AdmitFrequent, AdmitFrequentSketch
from torch_dynemb.process.torch_modes import one_thread
from torch_dynemb.rows.column_shards import by_shard
from torch_dynemb.rows.tensor_names import COUNT, PLACE, WEIGHT, score_entry, state_entry
from torch_dynemb.rows.tensor_names import SKETCH as CELLS
from torch_dynemb.table.clock import next_now
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.shards import IdSlots

_CALL = "delta_log.resume"
_IDS_AT_ONCE = 1 << 18
_LEAST_WAITING = 1 << 16


def load_commits(
    ranks: Ranks,
    base: str | PathLike[str],
    sinks: Callable[[], Sequence[DeltaSink]],
    model: nn.Module,
    parts: Sequence[TablePart],
    progress: bool | None,
) -> LoadReport:
    """Load a base and all whole commits after it. All ranks call it.

    Changed rows are folded in memory first, so each row is loaded once.

    Args:
        ranks: ranks that load together.
        base: path of the base.
        sinks: returns the sinks of all ranks that published.
        model: model to load.
        parts: its tables on this rank.
        progress: show a progress bar.

    Raises:
        Exception: as :func:`resume`. The model is unchanged then.
    """

    def prepare() -> tuple[Location, Manifest]:
        check_none_running()
        for group in groups_of(parts):
            check_saveable(_CALL, group)
        folder = checked_location(_CALL, base)
        manifest = read_manifest(folder)
        check_full(_CALL, folder, manifest)
        return folder, manifest

    folder, manifest = ranks.run(prepare)
    ranks.agree(_CALL, base=manifest.uuid)
    of_ranks = ranks.gather([part.name for part in parts])
    names = {name for of_rank in of_ranks for name in of_rank}
    ranks.run(lambda: _check_names(manifest, names, model))

    def folded(until: int | None) -> Folding:
        reader = LogReader(sinks, base=manifest.uuid, sequence=None)
        with open_checkpoint(str(folder)) as saved, one_thread():
            result = Folding(saved, parts)
            for batches in reader.read(until):
                result.add(batches)
                reader.taken(batches)
        return result

    folding = ranks.run(lambda: folded(None))
    # a trainer that still publishes: some ranks have read more commits than others
    last = min(ranks.gather(folding.sequence))
    if folding.sequence > last:
        folding = folded(last)
    later = ranks.run(folding.result)
    report = load_parts(
        ranks, _CALL, folder, manifest, parts, model, strict=True, progress=progress, later=later
    )

    def counted() -> None:
        count_from(groups_of(parts), None)
        for group in groups_of(parts):
            host = group.tables.host
            # times go on from those of the commit if this machine's clock is behind
            host.last_reading = max(host.last_reading, next_now(group.tables))

    ranks.run(counted)
    return report


def _check_names(manifest: Manifest, names: set[str], model: nn.Module) -> None:
    """Raise ValueError if a model has other tables or dense entries than the log."""
    of_dense = {*manifest.dense.entries, *(manifest.dense.values or {})}
    pairs = [
        ("tables", manifest.tables.keys(), names),
        ("dense entries", of_dense, dense_state(model).keys()),
    ]
    for what, logged, own in pairs:
        if logged != own:
            raise ValueError(
                f"{_CALL}: {what} {sorted(logged - own)} are only in the log, and "
                f"{sorted(own - logged)} only in the model: give the model that was published"
            )


class Folding:
    """Collector of the changes in commits, of the ids that this rank owns.

    Args:
        base: checkpoint before the commits; open as long as commits are added.
        parts: tables of the model on this rank.

    Attributes:
        sequence: number of the last commit; 0 if there is none.
    """

    def __init__(self, base: Checkpoint, parts: Sequence[TablePart]) -> None:
        self.sequence = 0
        self._base = base
        self._owned: dict[str, list[TablePart]] = {}
        for part in parts:
            self._owned.setdefault(part.name, []).append(part)
        self._tables: dict[str, _TableFolding] = {}
        self._dense: dict[str, Tensor] = {}
        self._state: Any = None

    def add(self, batches: Sequence[Batch]) -> None:
        """Add the next commit.

        Args:
            batches: batches of all ranks.

        Raises:
            ValueError: the log was published without ``resume=True``.
            DamagedFileError: the commit cannot be decoded, or does not fit the base.
        """
        sequence = batches[0].head.sequence
        if not can_resume(batches[0]):
            raise ValueError(
                f"delta_log.resume: commit {sequence} was published by a DeltaLog without "
                "resume=True, so it lacks optimizer state, scores and counts: give "
                "DeltaLog(resume=True) when you train. This log can be replayed into a model, "
                "with delta_log.replay"
            )
        commit = commit_of(batches, by_shard=True)
        try:
            logged = [_logged(batch) for batch in batches]
            described = _described(logged)
            if described.keys() != self._base.tables.keys():
                raise ValueError(
                    f"it has tables {sorted(described)}, but its base has "
                    f"{sorted(self._base.tables)}"
                )
            for name in described.keys() & self._owned.keys():
                if name not in self._tables:
                    self._tables[name] = _TableFolding(name, self._base, self._owned[name])
                waiting = _admission_of(batches, logged, name)
                self._tables[name].add(described[name], commit.tables[name], waiting)
            for name, values in commit.dense.items():
                self._dense[name] = values.clone()
            [payload] = [of.payload for of in batches[0].records if of.kind == STATE]
            self._state = decoded_state(payload)
        except DamagedFileError:
            raise
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            raise DamagedFileError(
                f"delta log: commit {sequence} cannot be decoded: {error}"
            ) from error
        self.sequence = sequence

    def result(self) -> LaterChanges:
        """Return the changes of all commits."""
        tables = {name: of.result() for name, of in self._tables.items()}
        return LaterChanges(self.sequence, tables, self._dense, self._state)


def can_resume(batch: Batch) -> bool:
    """Return whether a batch has everything that training resumes with."""
    return any(record.kind == STATE for record in batch.records)


def _described(logged: Sequence[Sequence[LoggedPart]]) -> dict[str, SavedTable]:
    """Return the descriptions of all tables in a commit."""
    tables = together((*part,) for of_batch in logged for part in of_batch)
    for name, table in tables.items():
        check_parts(name, table)
    return tables


def _logged(batch: Batch) -> list[LoggedPart]:
    found = [tables_of(record.payload) for record in batch.records if record.kind == TABLES]
    return found[0] if found else []


class _TableFolding:
    """Collector of the changes of a table, of the ids of its parts on this rank."""

    def __init__(self, name: str, base: Checkpoint, parts: Sequence[TablePart]) -> None:
        self._name, self._slots = name, [part.ids for part in parts]
        self._base, self._saved = base.tables[name], base.manifest.tables[name]
        self._base_parts = self._saved.first_parts
        self._rows = LatestRows()
        self._counts: LatestRows | None = None
        self._sketches: dict[IdSlots, Tensor] | None = None
        rule = parts[0].config.policy.admission
        if isinstance(rule, AdmitFrequent):
            self._counts = LatestRows()
            for counted in self._base.counts(_IDS_AT_ONCE):
                self._add_counts(counted.ids, counted.counts)
        elif isinstance(rule, AdmitFrequentSketch):
            self._sketches = {}

    def add(
        self,
        saved: SavedTable,
        delta: TableDelta,
        waiting: Sequence[tuple[LoggedPart, list[Record]]],
    ) -> None:
        """Add the changes of a commit.

        Args:
            saved: description of the table in it.
            delta: its rows and removed ids.
            waiting: parts with the first columns, and their records of admission.
        """
        self._change_shards(saved)
        self._saved = saved
        own = self._owned(delta.changed.ids)
        changed = delta.changed if bool(own.all()) else delta.changed.picked(own)
        columns: dict[str, Tensor] = {}
        if changed.ids.numel() > 0:
            columns = {WEIGHT: changed.rows}
            columns |= {state_entry(of.name): changed.state[of.name] for of in saved.state_tensors}
            columns |= {score_entry(word): changed.scores[word] for word in saved.scores}
        self._rows.add(changed.ids, columns, delta.removed[self._owned(delta.removed)])
        for part, records in waiting:
            if any(slots.shares(part.part.id_slots) for slots in self._slots):
                self._admit(part, records)

    def result(self) -> LaterTable:
        """Return the changes of all commits."""
        rows, saved = self._rows, self._saved
        no_row = torch.empty(0, saved.embedding_dim, dtype=saved.column_dtype, device="cpu")
        no_score = torch.empty(0, dtype=torch.int64, device="cpu")
        state = {}
        for of in saved.state_tensors:
            no_state = torch.empty(0, len(shards_of(saved)), dtype=of.dtype, device="cpu")
            state[of.name] = rows.column(state_entry(of.name), no_state)
        changed = RowBatch(
            rows.ids(),
            rows.column(WEIGHT, no_row),
            state,
            {word: rows.column(score_entry(word), no_score) for word in saved.scores},
        )
        counted = None
        if self._counts is not None:
            counted = CountedIds(self._counts.ids(), self._counts.column(COUNT, no_score))
        return LaterTable(
            saved,
            rows.touched(),
            changed,
            counted,
            self._sketches or {},
        )

    def _owned(self, ids: Tensor) -> Tensor:
        own = self._slots[0].owned(ids)
        for slots in self._slots[1:]:
            own |= slots.owned(ids)
        return own

    def _change_shards(self, saved: SavedTable) -> None:
        """Give values per row the column shards of the next commit."""
        before, now = shards_of(self._saved), shards_of(saved)

        def changed(values: Tensor) -> Tensor:
            return by_shard(values, before, now)

        for of in saved.state_tensors if before != now else ():
            if of.per_row:
                self._rows.change(state_entry(of.name), changed)

    # -- admission -------------------------------------------------------------------------------

    def _admit(self, part: LoggedPart, records: Sequence[Record]) -> None:
        name, slots = self._name, part.part.id_slots
        kinds = {record.kind for record in records}
        if self._counts is not None and COUNTS in kinds:
            self._counts.remove_owned(slots)
        if self._sketches is not None and slots not in self._sketches and SKETCH not in kinds:
            self._sketches[slots] = self._saved_sketch(slots)
        for record in records:
            if record.kind in (COUNTS, CHANGED_COUNTS) and self._counts is not None:
                self._add_counts(*checked_counts(name, record.payload))
            elif record.kind == SKETCH and self._sketches is not None:
                self._sketches[slots] = checked_sketch(name, record.payload).clone()
            elif record.kind == CHANGED_CELLS and self._sketches is not None:
                cells = self._sketches[slots].reshape(-1)
                cells[checked_ids(name, record.payload, PLACE)] = tensors_of(record.payload)[CELLS]

    def _add_counts(self, ids: Tensor, counts: Tensor) -> None:
        assert self._counts is not None
        own = self._owned(ids)
        ids, counts = ids[own], counts[own]
        waits = counts > 0
        self._counts.add(ids[waits], {COUNT: counts[waits]}, ids[~waits])

    def _saved_sketch(self, slots: IdSlots) -> Tensor:
        """Return the sketch of a part in the base, which has the same parts as the first commit."""
        parts = [part for part in self._base_parts if part.id_slots == slots]
        [cells] = self._base.sketches(parts)
        return cells


def _admission_of(
    batches: Sequence[Batch], logged: Sequence[Sequence[LoggedPart]], name: str
) -> list[tuple[LoggedPart, list[Record]]]:
    """Return the parts of a table with the first columns, and their records of admission."""
    kinds = (COUNTS, SKETCH, CHANGED_COUNTS, CHANGED_CELLS)
    return [
        (part, [of for of in batch.records if of.kind in kinds and of.table == number])
        for batch, parts in zip(batches, logged, strict=True)
        for number, part in enumerate(parts)
        if part.name == name and part.part.first_column == 0
    ]


class LatestRows:
    """The last row of each id, from changes that are added in order.

    Added rows wait until there are as many as folded ones, so that adding n rows takes O(n log n)
    and memory for twice the distinct ids.
    """

    def __init__(self) -> None:
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        self._ids, self._places = [none], [none]  # the place of a removed id is -1
        self._columns: dict[str, list[Tensor]] = {}
        self._folded = self._rows = self._waiting = 0

    def add(self, ids: Tensor, columns: Mapping[str, Tensor], removed: Tensor) -> None:
        """Add rows, and remove ids.

        Args:
            ids: int64 [n], unique.
            columns: [n, ...] each, with the same names in every call.
            removed: int64 [m], unique, other ids.
        """
        count = ids.numel()
        if count + removed.numel() == 0:
            return
        self._ids += [ids, removed]
        self._places.append(torch.arange(self._rows, self._rows + count, device="cpu"))
        self._places.append(torch.full_like(removed, -1))
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)
        self._rows += count
        self._waiting += count + removed.numel()
        if self._waiting > max(_LEAST_WAITING, self._folded):
            self._fold()

    def remove_owned(self, slots: IdSlots) -> None:
        """Remove all ids of a part.

        Args:
            slots: slots of the part.
        """
        ids = self.ids()
        self.add(ids[:0], {}, ids[slots.owned(ids)])

    def change(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Replace a column.

        Args:
            name: its name.
            change: returns the new values, [n, ...], from the old ones.
        """
        self._fold()
        if name in self._columns:
            self._columns[name] = [change(self._columns[name][0])]

    def touched(self) -> Tensor:
        """Return all ids that were added or removed, int64 [n], ascending."""
        self._fold()
        return self._ids[0]

    def ids(self) -> Tensor:
        """Return the ids with a row, int64 [n], ascending."""
        self._fold()
        return self._ids[0][self._places[0] >= 0]

    def column(self, name: str, empty: Tensor) -> Tensor:
        """Return the values of the ids with a row.

        Args:
            name: name of the column.
            empty: result if no row was ever added.
        """
        self._fold()
        return self._columns[name][0] if name in self._columns else empty

    def _fold(self) -> None:
        if self._waiting == 0:
            return
        ids, of_ids = torch.cat(self._ids).unique(return_inverse=True)
        order = torch.arange(of_ids.numel(), device="cpu")
        last = torch.zeros_like(ids).scatter_reduce_(0, of_ids, order, "amax")
        places = torch.cat(self._places)[last]
        here = places >= 0
        for name, values in self._columns.items():
            self._columns[name] = [torch.cat(values)[places[here]]]
        self._rows = int(here.sum())
        places[here] = torch.arange(self._rows, device="cpu")
        self._ids, self._places = [ids], [places]
        self._folded, self._waiting = ids.numel(), 0


__all__ = ["Folding", "LatestRows", "can_resume", "load_commits"]
