"""Loads a group of tables as it stood: every id in its slot, every row in its place."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

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
    NO_GROUP,
    SLOT,
    WEIGHT,
    free_rows_entry,
    score_entry,
    state_entry,
    tombstones_entry,
)
from torch_dynemb.checkpoint.loading.group import GroupLoad
from torch_dynemb.checkpoint.loading.group_state import check_handles, read_group_state
from torch_dynemb.checkpoint.loading.part import Stream
from torch_dynemb.checkpoint.loading.table_plan import TablePlan
from torch_dynemb.checkpoint.manifest.records import Manifest, SavedGroup, SavedPart
from torch_dynemb.checkpoint.parts import TablePart
from torch_dynemb.checkpoint.reading.read_ahead import Read, read_ahead
from torch_dynemb.checkpoint.reading.saved_rows import COUNTED, SLOTS, SavedRows, kinds_of
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    BUCKET_WORDS,
    GENERATION_BITS,
    Clock,
    Meta,
    Slab,
    Table,
)
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.group_config import GroupConfig
from torch_dynemb.table.records import record_bytes
from torch_dynemb.table.row_access import handle_rows, state_tensors, write_rows
from torch_dynemb.table.score_check import check_score, check_waiting
from torch_dynemb.table.state import empty
from torch_dynemb.table.state_check import check_counts, clamp_committed

_GENERATION_MASK = (1 << GENERATION_BITS) - 1
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
        own = plan.part.optimizer
        optimizer = None if own is None else own.description()
        if (
            source is None
            or source.group == NO_GROUP
            or source.number != plan.part.table
            or plan.fresh
            or plan.saved.dtype != plan.part.dtype
            or plan.saved.padding_idx != plan.part.config.padding_idx
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
    same = saved.score_words == list(config.layout.score_words) and _same_slabs(config, saved)
    return number if same and len(saved.tables) == len(plans) else None


def _same_slabs(config: GroupConfig, saved: SavedGroup) -> bool:
    """Whether those tables have slabs in common, and in the same order, that had them."""
    of_tables = [
        table.slab._replace(tiered=number in saved.stored)
        for number, table in enumerate(config.tables)
    ]
    slabs = sorted(set(of_tables), key=lambda slab: slab.order)
    numbers = [slabs.index(slab) for slab in of_tables]
    return numbers == [config.slab_of(table) for table in range(len(config.tables))]


def source_of(part: TablePart, saved: Sequence[SavedPart]) -> SavedPart | None:
    """The saved part with the same columns and ids."""
    for of in saved:
        columns = range(of.first_column, of.first_column + of.columns)
        if of.id_slots == part.ids and columns == part.columns:
            return of
    return None


class _Saved(NamedTuple):
    """Where a table comes from.

    Attributes:
        plan: of the table.
        source: the saved part with the same columns and ids.
        first: of column shards, the one whose files have ids and scores.
    """

    plan: TablePlan
    source: SavedPart
    first: SavedPart

    @property
    def table(self) -> int:
        """Its number in the group."""
        return self.plan.part.table

    @property
    def where(self) -> str:
        """Of whom errors tell."""
        return f"table {self.plan.part.name!r} was saved"


class ExactLoad(GroupLoad):
    """Loads all tables of a group.

    Args:
        group: of the model.
        plans: of all its tables.
        saved: the group that was saved.
        stream: where from.

    Raises:
        DamagedFileError: the file of the group is damaged, or says what cannot be.
    """

    exact = True

    def __init__(
        self, group: TableGroup, plans: Sequence[TablePlan], saved: SavedGroup, stream: Stream
    ) -> None:
        super().__init__(group, plans, stream)
        self._words = group.config.layout.score_words
        self._saved = [_saved_of(plan) for plan in plans]
        in_order = sorted(self._saved, key=lambda of: of.table)
        counted = [in_order[t].first.counted for t in group.config.layout.counter_tables]
        sizes = [*(of.source.ids for of in in_order), *counted]
        self._state = read_group_state(stream.folder, saved.file, self._tables, sizes)

    @property
    def counts(self) -> list[int]:
        return [of.source.ids for of in self._saved]

    # -- rows ------------------------------------------------------------------------------------

    def stream(self) -> None:
        tables = self._tables
        tables.memory.bind(
            tables.index,
            tables.rows,
            self._state[GROUP_TABLES][:, Table.BUCKET_COUNT].tolist(),
            self._state[GROUP_SLABS][:, Slab.NEXT_ROW].tolist(),
        )
        in_store = [
            saved
            for saved in self._saved
            if tables.stored(tables.config.slab_of(saved.table)) is not None
        ]
        read_ahead(self._reads([saved for saved in self._saved if saved not in in_store]))
        for saved in in_store:
            self._stream_to_store(saved)

    def _stream_to_store(self, saved: _Saved) -> None:
        """Rows and state of a table, as many rows at a time as fit in a piece with their state."""
        tables, table = self._tables, saved.table
        slab = tables.config.slab_of(table)
        state = state_tensors(tables, slab)
        weights = tables.rows.weights[slab]
        with self._open(saved, saved.source) as rows, self._open(saved, saved.first) as ids_of:
            handles = self._handles_of(saved, rows)
            for low, high in rows.ranges(record_bytes(tables.config, slab)):
                ids = torch.empty(high - low, dtype=torch.int64)
                ids_of.read(ID, low, ids)
                own = weights.new_empty(high - low, weights.shape[1])
                rows.read(WEIGHT, low, own)
                of_state = {}
                for name, tensor in state.items():
                    values = tensor.new_empty(high - low, *tensor.shape[1:])
                    rows.read(state_entry(name), low, values)
                    if values.dtype == torch.int32:
                        check_counts(state_entry(name), values)
                    of_state[name] = values
                of_rows = handles[low:high]
                newest = self.loader.newest
                newest[slab] = max(newest[slab], int((of_rows & _GENERATION_MASK).max()))
                write_rows(tables, table, ids, of_rows, own, of_state)
                row_bytes = rows.section(WEIGHT).row_bytes
                row_bytes += sum(rows.section(state_entry(name)).row_bytes for name in state)
                self._stream.progress((high - low) * row_bytes)
            rows.finish()
            ids_of.finish()

    def _handles_of(self, saved: _Saved, rows: SavedRows) -> Tensor:
        handles = rows.whole(HANDLE)
        slab = self._tables.config.slab_of(saved.table)
        check_handles(f"{saved.where} with rows that", handles, self._rows_of(slab))
        return handles

    def _reads(self, in_memory: Sequence[_Saved]) -> Generator[Read, None, None]:
        """Rows and state of tables, piece by piece."""
        tables = self._tables
        for saved in in_memory:
            slab = tables.config.slab_of(saved.table)
            targets = {WEIGHT: tables.rows.weights[slab]}
            for name, tensor in state_tensors(tables, slab).items():
                targets[state_entry(name)] = tensor
            with self._open(saved, saved.source) as rows:
                numbers = handle_rows(self._handles_of(saved, rows))
                for name, target in targets.items():
                    section = rows.section(name)
                    for low, high in rows.ranges(section.row_bytes):
                        yield self._read(rows, name, low, numbers[low:high], target)
                rows.finish()

    def _read(self, rows: SavedRows, name: str, low: int, numbers: Tensor, target: Tensor) -> Read:
        """Rows from ``low`` on, which go to the rows of a target with these numbers."""
        section = rows.section(name)
        first, last = int(numbers[0]), int(numbers[-1])
        follow = last - first == numbers.shape[0] - 1 and bool((numbers[1:] > numbers[:-1]).all())
        straight = follow and target.device.type == "cpu"

        def use(piece: Tensor) -> None:
            if not straight:
                here, values = numbers.to(target.device), piece.to(target.device)
                _widened(target).index_copy_(0, here, _widened(values))
            if piece.dtype == torch.int32:
                check_counts(name, piece)
            self._stream.progress(piece.shape[0] * section.row_bytes)

        return Read(
            (numbers.shape[0], *section.shape[1:]),
            section.dtype,
            lambda out: rows.read(name, low, out),
            use,
            target[first : last + 1] if straight else None,
        )

    def _rows_of(self, slab: int) -> int:
        return int(self._state[GROUP_SLABS][slab, Slab.NEXT_ROW])

    def _open(self, saved: _Saved, part: SavedPart) -> SavedRows:
        return self._stream.open(part.rows, kinds_of(saved.plan.saved, part, self._words))

    # -- ids -------------------------------------------------------------------------------------

    def check(self) -> None:
        # takes the memory of the index of one table
        self._place_all(publish=False)
        optimizer = self._tables.config.optimizer
        steps = [] if optimizer is None else [t for t in optimizer.state if t.dtype == torch.int32]
        for saved in self._saved if steps else []:
            with self._open(saved, saved.source) as rows:
                for tensor in steps:
                    check_counts(state_entry(tensor.name), rows.whole(state_entry(tensor.name)))

    def publish(self) -> None:
        tables = self._tables
        index, rows = tables.index, tables.rows
        empty(tables)
        generation = index.slabs[:, Slab.GENERATION].clone()
        row_bytes = index.slabs[:, Slab.ROW_BYTES].clone()
        # counts first: whatever fails below, they say what must be taken away
        index.tables.copy_(self._state[GROUP_TABLES])
        index.slabs.copy_(self._state[GROUP_SLABS])
        index.slabs[:, Slab.ROW_BYTES] = row_bytes
        index.slabs[:, Slab.GENERATION].clamp_(min=generation)
        clamp_committed(tables)
        index.meta[:, Meta.SEED] = self._state[GROUP_SEEDS].to(tables.device)
        for s in range(len(tables.config.slabs)):
            free = self._state[free_rows_entry(s)]
            if tables.stored(s) is not None:
                free = _newer(free, int(generation[s]))
            else:  # what these rows had before the load may be newer than their next owners
                rows.generations[s][(free >> GENERATION_BITS).to(tables.device)] = 0
            index.free_rows[s, : free.shape[0]] = free.to(tables.device)
        self._place_all(publish=True)
        index.clock.copy_(self._state[GROUP_CLOCK])
        index.sketch.copy_(self._state[GROUP_SKETCH])
        rows.row_clock.copy_(self._state[GROUP_ROW_CLOCK])
        if tables.host.proposed_now is not None:
            tables.host.proposed_now.fill_(max(saved.plan.saved.now for saved in self._saved))
        tables.bind_memory()
        self.loader.end()

    def _place_all(self, *, publish: bool) -> None:
        """Ids into their slots, or into those of an index that nobody sees; and all checks."""
        tables = self._tables
        owned = []
        for s in range(len(tables.config.slabs)):
            owned.append(torch.zeros(self._rows_of(s), dtype=torch.bool))
            owned[s][self._state[free_rows_entry(s)] >> GENERATION_BITS] = True
        for saved in self._saved:
            buckets = self._buckets(saved.table, publish)
            handles = self._place_ids(saved, buckets, publish)
            owned[tables.config.slab_of(saved.table)][handles >> GENERATION_BITS] = True
            del buckets, handles
            self._place_counts(saved, publish)
        for slab, of_slab in zip(tables.config.slabs, owned, strict=True):
            # as many as ids and free rows together: one that two have would leave one over
            if not bool(of_slab.all()):
                raise ValueError(f"rows {slab.name!r} were saved, some of them with two owners")

    def _buckets(self, table: int, publish: bool) -> Tensor:
        """The buckets of a table that is empty."""
        count = int(self._state[GROUP_TABLES][table, Table.BUCKET_COUNT])
        if not publish:
            size = (count, BUCKET_WORDS)
            return torch.zeros(size, dtype=torch.int64, device=self._tables.device)
        begin = int(self._tables.index.meta[table, Meta.REGION_BEGIN])
        return self._tables.index.buckets[begin : begin + count]

    def _place_ids(self, saved: _Saved, buckets: Tensor, publish: bool) -> Tensor:
        """Returns the handles, int64 [n], of the CPU."""
        tables, count = self._tables, saved.source.ids
        begin = int(tables.index.meta[saved.table, Meta.REGION_BEGIN])
        slab = tables.config.slab_of(saved.table)
        writes_generations = publish and tables.stored(slab) is None
        generations = tables.rows.generations[slab]
        step = int(self._state[GROUP_CLOCK][Clock.STEP])
        with (
            self._open(saved, saved.source) as own,
            self._open(saved, saved.first) as ids_of,
        ):
            ids, handles = ids_of.whole(ID), own.whole(HANDLE)
            check_handles(f"{saved.where} with rows that", handles, self._rows_of(slab))
            for low in range(0, count, _IDS_AT_ONCE):
                high = min(low + _IDS_AT_ONCE, count)
                slots = torch.empty(high - low, dtype=own.section(SLOT).dtype)
                own.read(SLOT, low, slots)
                bucket, slot = _places(saved.where, slots, buckets)
                part = handles[low:high].to(tables.device)
                buckets[bucket, slot] = ids[low:high].to(tables.device)
                buckets[bucket, BUCKET_WIDTH + slot] = part + 1
                if writes_generations:
                    generations[part >> GENERATION_BITS] = (part & _GENERATION_MASK).to(torch.int32)
                for number, word in enumerate(self._words):
                    values = torch.empty(high - low, dtype=torch.int64)
                    ids_of.read(score_entry(word), low, values)
                    check_score(saved.where, word, values, step)
                    if publish:
                        at = begin + bucket, number * BUCKET_WIDTH + slot
                        tables.index.scores[at] = values.to(tables.device)
            own.finish()
            ids_of.finish()
        self._place_tombstones(saved.table, buckets)
        self._check_index(saved.where, saved.table, buckets, ids, handles)
        return handles

    def _place_tombstones(self, table: int, buckets: Tensor) -> None:
        left = self._state[tombstones_entry(table)].to(self._tables.device)
        buckets[left[:, 0] // BUCKET_WIDTH, left[:, 0] % BUCKET_WIDTH] = left[:, 1]

    def _place_counts(self, saved: _Saved, publish: bool) -> None:
        tables, file, own = self._tables, saved.first.counts, saved.source.counts
        number = tables.config.layout.counters[saved.table]
        if number is None:
            return
        buckets = self._buckets(number, publish)
        ids = counts = torch.empty(0, dtype=torch.int64)
        where = f"{saved.where} with counts of admission: it"
        if file is not None and own is not None:
            with self._stream.open([file], {**COUNTED, **SLOTS}) as rows:
                ids, counts = (rows.whole(name) for name in (ID, COUNT))
                rows.finish()
            # of column shards, each lays out its index on its own
            with self._stream.open([own], SLOTS) as rows:
                slots = rows.whole(SLOT)
                rows.finish()
            check_waiting(where, ids, counts)
            bucket, slot = _places(where, slots, buckets)
            buckets[bucket, slot] = ids.to(tables.device)
            buckets[bucket, BUCKET_WIDTH + slot] = counts.to(tables.device)
        self._place_tombstones(number, buckets)
        self._check_index(where, number, buckets, ids, counts - 1)

    def _check_index(
        self, where: str, table: int, buckets: Tensor, ids: Tensor, handles: Tensor
    ) -> None:
        """Raises ValueError unless every id is found where it was put, and nothing else is."""
        meta = self._tables.index.meta[table : table + 1].clone()
        meta[0, Meta.SEED] = self._state[GROUP_SEEDS][table]
        meta[0, Meta.REGION_BEGIN] = 0
        meta[0, Meta.REGION_BUCKETS] = buckets.shape[0]
        row = self._state[GROUP_TABLES][table : table + 1].to(self._tables.device)
        index = ops.IndexTensors.read_only(buckets, row, meta)
        for low in range(0, ids.numel(), _IDS_AT_ONCE):
            part = ids[low : low + _IDS_AT_ONCE].to(self._tables.device)
            offsets = torch.tensor([0, part.numel()], device=self._tables.device)
            found = ops.find(index, part, offsets, [0]).handles
            if not torch.equal(found.cpu(), handles[low : low + _IDS_AT_ONCE]):
                raise ValueError(f"{where} with ids where no lookup finds them, or with one twice")
        occupied = left = 0
        for low in range(0, buckets.shape[0], _IDS_AT_ONCE):
            piece = buckets[low : low + _IDS_AT_ONCE]
            taken = piece[:, BUCKET_WIDTH:] != 0
            occupied += int(taken.sum())
            left += int(((piece[:, :BUCKET_WIDTH] != 0) & ~taken).sum())
        if (occupied, left) != (ids.numel(), int(row[0, Table.TOMBSTONES])):
            raise ValueError(
                f"{where} with {occupied} ids and {left} tombstones in its slots, expected "
                f"{ids.numel()} and {int(row[0, Table.TOMBSTONES])}"
            )


def _saved_of(plan: TablePlan) -> _Saved:
    source = source_of(plan.part, plan.saved.parts)
    assert source is not None
    first = next(of for of in plan.saved.first_parts if of.id_slots == source.id_slots)
    return _Saved(plan, source, first)


def _places(where: str, slots: Tensor, buckets: Tensor) -> tuple[Tensor, Tensor]:
    """Buckets and slots in them, int64 [n] each, on the device of the buckets.

    Raises:
        ValueError: a slot is beyond the buckets.
    """
    most = buckets.shape[0] * BUCKET_WIDTH
    if slots.numel() > 0 and not 0 <= int(slots.min()) <= int(slots.max()) < most:
        wrong = int(slots.min()) if int(slots.min()) < 0 else int(slots.max())
        raise ValueError(f"{where} with an id in slot {wrong}, expected 0 to {most - 1}")
    slots = slots.to(device=buckets.device, dtype=torch.int64)
    return slots // BUCKET_WIDTH, slots % BUCKET_WIDTH


def _newer(free: Tensor, generation: int) -> Tensor:
    """Handles of free rows, none of which is one that a row of a store has had before a load.

    Args:
        free: int64 [n], of the CPU.
        generation: no handle before the load is newer than this.
    """
    rows = free >> GENERATION_BITS << GENERATION_BITS
    return torch.maximum(free, rows | generation % _GENERATION_MASK + 1) if generation else free


def _widened(rows: Tensor) -> Tensor:
    """Rows as elements of 16 bytes, of which a copy moves fewer, where they are made of such."""
    if rows.dim() == 2 and rows.shape[1] * rows.element_size() % 16 == 0:
        return rows.view(torch.complex128)
    return rows


__all__ = ["ExactLoad", "saved_group_of", "source_of"]
