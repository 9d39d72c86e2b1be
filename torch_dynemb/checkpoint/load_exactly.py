"""Loads a group of tables as it stood: every id in its slot, every row in its place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.entries import (
    COUNT,
    GROUP_CLOCK,
    GROUP_ROW_CLOCK,
    GROUP_SEEDS,
    GROUP_SKETCH,
    GROUP_SLABS,
    GROUP_TABLES,
    HANDLE,
    ID,
    SLOT,
    WEIGHT,
    free_rows_entry,
    score_entry,
    state_entry,
    tombstones_entry,
)
from torch_dynemb.checkpoint.load_part import Stream
from torch_dynemb.checkpoint.manifest import NO_GROUP, Manifest, SavedGroup, SavedPart
from torch_dynemb.checkpoint.parts import TablePart
from torch_dynemb.checkpoint.saved_rows import SavedRows
from torch_dynemb.checkpoint.summed_files import SummedReader
from torch_dynemb.checkpoint.table_plan import TablePlan
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    GENERATION_BITS,
    Clock,
    Meta,
    Slab,
    Table,
)
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.state import empty

_IDS_AT_ONCE = 1 << 20


def saved_group_of(group: TableGroup, plans: Sequence[TablePlan], manifest: Manifest) -> int | None:
    """The number of the saved group that had the same tables, parts and policies; None: none had.

    Args:
        group: of the model.
        plans: of its tables that are loaded.
        manifest: of the checkpoint.
    """
    config = group.config
    if sorted(plan.part.table for plan in plans) != list(range(len(config.tables))):
        return None
    found = set()
    for plan in plans:
        source = source_of(plan.part, plan.saved.parts)
        dtype = str(plan.part.config.dtype).removeprefix("torch.")
        optimizer = None if config.optimizer is None else config.optimizer.description()
        if (
            source is None
            or source.group == NO_GROUP
            or source.number != plan.part.table
            or plan.fresh
            or plan.saved.dtype != dtype
            or plan.saved.optimizer != optimizer
            or plan.saved.policy != plan.part.config.policy.description()
            or source.counters[Table.BUCKET_COUNT]
            > int(group.index.meta[plan.part.table, Meta.REGION_BUCKETS])
        ):
            return None
        found.add(source.group)
    if len(found) != 1:
        return None
    (number,) = found
    saved = manifest.groups[number]
    same = saved.score_words == list(config.layout.score_words)
    return number if same and len(saved.tables) == len(plans) else None


def source_of(part: TablePart, saved: Sequence[SavedPart]) -> SavedPart | None:
    """The saved part with the same columns and ids."""
    for of in saved:
        columns = range(of.first_column, of.first_column + of.columns)
        if of.id_slots == part.ids and columns == part.columns:
            return of
    return None


class ExactLoad:
    """Loads all tables of a group.

    Args:
        group: of the model.
        plans: of all its tables.
        saved: the group that was saved.
        stream: where from.
    """

    def __init__(
        self, group: TableGroup, plans: Sequence[TablePlan], saved: SavedGroup, stream: Stream
    ) -> None:
        self._group, self._plans, self._stream = group, plans, stream
        sources = [source_of(plan.part, plan.saved.parts) for plan in plans]
        self._sources = [source for source in sources if source is not None]
        # of column shards, the files of the first one have ids and scores
        self._first = [
            next(of for of in plan.saved.first_parts if of.id_slots == source.id_slots)
            for plan, source in zip(plans, self._sources, strict=True)
        ]
        self._saved = saved
        self._state = self._read_state()

    @property
    def counts(self) -> list[int]:
        """Ids by plan."""
        return [source.ids for source in self._sources]

    def _read_state(self) -> dict[str, Tensor]:
        """What the group's own file has."""
        file = self._saved.file
        reader = SummedReader(
            self._stream.folder / file.path, file.sums, checked=self._stream.checked
        )
        try:
            found = {}
            for name, section in reader.tensors.items():
                found[name] = torch.empty(section.shape, dtype=section.dtype)
                reader.read(name, 0, found[name])
            reader.finish()
        finally:
            reader.close()
        return found

    def stream(self) -> None:
        """Reads rows into their places."""
        tables = self._group.tables
        slabs = len(tables.config.slabs)
        tables.memory.bind(
            tables.index,
            tables.rows,
            self._state[GROUP_TABLES][:, Table.BUCKET_COUNT].tolist(),
            self._state[GROUP_SLABS][:, Slab.NEXT_ROW].tolist(),
        )
        optimizer = tables.config.optimizer
        names = [] if optimizer is None else [tensor.name for tensor in optimizer.state]
        for plan, source in zip(self._plans, self._sources, strict=True):
            slab = tables.config.slab_of(plan.part.table)
            targets = {WEIGHT: tables.rows.weights[slab]}
            for k, name in enumerate(names):
                targets[state_entry(name)] = tables.rows.state[k * slabs + slab]
            with self._open(source) as rows:
                numbers = rows.whole(HANDLE) >> GENERATION_BITS
                if numbers.numel() > 0 and not (
                    int(numbers.min()) >= 0 and int(numbers.max()) < targets[WEIGHT].shape[0]
                ):
                    raise ValueError(f"table {plan.part.name!r} was saved with wrong row numbers")
                for name, target in targets.items():
                    self._scatter(rows, name, numbers, target)
                rows.finish()

    def _open(self, part: SavedPart) -> SavedRows:
        return SavedRows(self._stream.folder, part.rows, checked=self._stream.checked)

    def _scatter(self, rows: SavedRows, name: str, numbers: Tensor, target: Tensor) -> None:
        section = rows.section(name)
        buffer = torch.empty(0)
        for low, high in rows.ranges(section.row_bytes):
            places = numbers[low:high]
            first, last = int(places[0]), int(places[-1])
            follow = last - first == high - low - 1 and bool((places[1:] > places[:-1]).all())
            if follow and target.device.type == "cpu":
                rows.read(name, low, target[first : last + 1])
            else:
                if buffer.numel() == 0:
                    buffer = torch.empty((high - low, *section.shape[1:]), dtype=section.dtype)
                piece = buffer[: high - low]
                rows.read(name, low, piece)
                target.index_copy_(0, places.to(target.device), piece.to(target.device))
            self._stream.progress((high - low) * section.row_bytes)

    def publish(self) -> None:
        """Puts the ids into their slots, and takes over clocks and counts."""
        tables = self._group.tables
        index, rows = tables.index, tables.rows
        empty(tables)
        index.meta[:, Meta.SEED] = self._state[GROUP_SEEDS].to(tables.device)
        for plan, source, first in zip(self._plans, self._sources, self._first, strict=True):
            self._place_ids(plan, source, first)
            self._place_counts(plan, first)
        for t in range(index.tables.shape[0]):
            left = self._state[tombstones_entry(t)].to(tables.device)
            begin = int(index.meta[t, Meta.REGION_BEGIN])
            buckets = index.buckets[begin:]
            buckets[left[:, 0] // BUCKET_WIDTH, left[:, 0] % BUCKET_WIDTH] = left[:, 1]
        for s in range(len(tables.config.slabs)):
            free = self._state[free_rows_entry(s)]
            index.free_rows[s, : free.shape[0]] = free.to(tables.device)
        row_bytes = index.slabs[:, Slab.ROW_BYTES].clone()
        generation = index.slabs[:, Slab.GENERATION].clone()
        index.slabs.copy_(self._state[GROUP_SLABS])
        index.slabs[:, Slab.ROW_BYTES] = row_bytes
        index.slabs[:, Slab.GENERATION].clamp_(min=generation)
        index.slabs[:, Slab.COMMITTED_ROWS].clamp_(max=index.free_rows.shape[1])
        index.clock.copy_(self._state[GROUP_CLOCK])
        index.sketch.copy_(self._state[GROUP_SKETCH])
        rows.row_clock.copy_(self._state[GROUP_ROW_CLOCK])
        index.tables.copy_(self._state[GROUP_TABLES])
        if tables.host.proposed_now is not None:
            tables.host.proposed_now.fill_(index.clock[Clock.NOW])
        tables.bind_memory()
        self._check_found()

    def _place_ids(self, plan: TablePlan, source: SavedPart, first: SavedPart) -> None:
        tables, table = self._group.tables, plan.part.table
        index = tables.index
        begin = int(index.meta[table, Meta.REGION_BEGIN])
        count = int(self._state[GROUP_TABLES][table, Table.BUCKET_COUNT])
        buckets, scores = index.buckets[begin : begin + count], index.scores[begin : begin + count]
        generations = tables.rows.generations[tables.config.slab_of(table)]
        with self._open(source) as own, self._open(first) as ids_of:
            ids = ids_of.whole(ID)
            for low in range(0, source.ids, _IDS_AT_ONCE):
                high = min(low + _IDS_AT_ONCE, source.ids)
                slots, handles = (
                    torch.empty(high - low, dtype=own.section(name).dtype)
                    for name in (SLOT, HANDLE)
                )
                own.read(SLOT, low, slots)
                own.read(HANDLE, low, handles)
                bucket, slot = slots.long() // BUCKET_WIDTH, slots.long() % BUCKET_WIDTH
                bucket, slot = bucket.to(tables.device), slot.to(tables.device)
                handles = handles.to(tables.device)
                buckets[bucket, slot] = ids[low:high].to(tables.device)
                buckets[bucket, BUCKET_WIDTH + slot] = handles + 1
                generations[handles >> GENERATION_BITS] = (
                    handles & ((1 << GENERATION_BITS) - 1)
                ).to(torch.int32)
                for number, word in enumerate(tables.config.layout.score_words):
                    values = torch.empty(high - low, dtype=torch.int64)
                    ids_of.read(score_entry(word), low, values)
                    scores[bucket, number * BUCKET_WIDTH + slot] = values.to(tables.device)

    def _place_counts(self, plan: TablePlan, first: SavedPart) -> None:
        tables = self._group.tables
        number = tables.config.layout.counters[plan.part.table]
        if number is None or first.counts is None:
            return
        begin = int(tables.index.meta[number, Meta.REGION_BEGIN])
        buckets = tables.index.buckets[begin:]
        with SavedRows(self._stream.folder, [first.counts], checked=self._stream.checked) as rows:
            ids, counts, slots = (rows.whole(n).to(tables.device) for n in (ID, COUNT, SLOT))
            rows.finish()
        buckets[slots // BUCKET_WIDTH, slots % BUCKET_WIDTH] = ids
        buckets[slots // BUCKET_WIDTH, BUCKET_WIDTH + slots % BUCKET_WIDTH] = counts

    def _check_found(self) -> None:
        """Raises ValueError unless every id is found where it was put."""
        tables = self._group.tables
        for plan, source, first in zip(self._plans, self._sources, self._first, strict=True):
            with self._open(source) as own, self._open(first) as ids_of:
                ids, handles = ids_of.whole(ID), own.whole(HANDLE)
            offsets = torch.tensor([0, source.ids], device=tables.device)
            found = ops.find(
                tables.index, ids.to(tables.device), offsets, [plan.part.table]
            ).handles
            if not torch.equal(found.cpu(), handles):
                raise ValueError(
                    f"table {plan.part.name!r} was saved with ids where no lookup finds them"
                )

    def give_back(self) -> None:
        """After a failure: the tables are empty."""
        empty(self._group.tables)
        self._group.tables.bind_memory()


__all__ = ["ExactLoad", "saved_group_of", "source_of"]
