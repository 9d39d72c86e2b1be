"""What a save reads of a group of tables: the tables themselves, or copies of them.

A scan of the index gives the id of every row, so that rows are then read in the order in which they
lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS, Clock, Meta, Slab, Table
from torch_dynemb.ops.tensors import IndexTensors, RowTensors
from torch_dynemb.storage.host import HostMemory
from torch_dynemb.table.group_config import GroupConfig
from torch_dynemb.table.tables import Tables

PIECE_BYTES = 8 << 20
_BUCKETS_AT_ONCE = 1 << 16
_ROWS_AT_ONCE = 1 << 16


class SlabRows(NamedTuple):
    """The used rows of a slab.

    Attributes:
        weights: [rows, dim].
        generations: int32 [rows].
        state: optimizer state by name: [rows] or [rows, columns].
        free: int64 [n], handles of rows that no id has.
    """

    weights: Tensor
    generations: Tensor
    state: dict[str, Tensor]
    free: Tensor


class IndexTable(NamedTuple):
    """The buckets of a table that are in use.

    Attributes:
        buckets: int64 [buckets, 8], four keys and four stored words each.
        scores: int64 [buckets, 4 * words]; no columns where nothing is kept.
    """

    buckets: Tensor
    scores: Tensor


class RowConstants(NamedTuple):
    """What initial rows are computed from, of the CPU.

    Attributes:
        meta: int64 [tables, 16].
        init_data: float64 [numbers].
    """

    meta: Tensor
    init_data: Tensor


class GroupSource(NamedTuple):
    """A group of tables as it is at one time.

    Attributes:
        config: of the group.
        buckets_of: by table, and then by table of counted ids.
        slabs: by slab.
        tables, slab_counts, clock, row_clock: of the CPU; see ``ops.IndexTensors``.
        seeds: int64 [tables], of the CPU.
        hyper: float64 [tables, 24], of the CPU.
        sketch: int32 [cells].
        now: seconds of the lookups that follow, as far as this rank knows.
        unwritten: rows of ids that were never trained may have no values yet, which
            :func:`write_initial_rows` computes from this; None: all have.
    """

    config: GroupConfig
    buckets_of: list[IndexTable]
    slabs: list[SlabRows]
    tables: Tensor
    slab_counts: Tensor
    clock: Tensor
    row_clock: Tensor
    seeds: Tensor
    hyper: Tensor
    sketch: Tensor
    now: int
    unwritten: RowConstants | None


def source_of(tables: Tables, *, to_be_copied: bool = False) -> GroupSource:
    """What a group holds: the tensors themselves, of which small ones are copies.

    Args:
        tables: of the group.
        to_be_copied: the large tensors will be copied, too. Then rows that have no values yet get
            them in the copies, which takes a scan of the index that training need not wait for;
            on a GPU, whose kernels no copy meets, they get them at once.
    """
    later = to_be_copied and isinstance(tables.memory, HostMemory)
    if not later:
        ops.materialize_(tables.index, tables.rows)
    config, index, rows = tables.config, tables.index, tables.rows
    slabs = len(config.slabs)
    state = () if config.optimizer is None else config.optimizer.state
    parts = []
    for t in range(index.tables.shape[0]):
        active = index.active_buckets(t)
        scored = bool(config.layout.score_words) and t < len(config.tables)
        scores = index.scores[active] if scored else index.scores[:0]
        parts.append(IndexTable(index.buckets[active], scores))
    of_slabs = []
    for s in range(slabs):
        used = index.used_rows(s)
        of_slabs.append(
            SlabRows(
                rows.weights[s][:used],
                rows.generations[s][:used],
                {tensor.name: rows.state[k * slabs + s][:used] for k, tensor in enumerate(state)},
                index.free_rows[s, : int(index.slabs[s, Slab.FREE_COUNT])],
            )
        )
    small = (index.tables, index.slabs, index.clock, rows.row_clock, index.meta[:, 0], rows.hyper)
    counts, slab_counts, clock, row_clock, seeds, hyper = (t.detach().cpu().clone() for t in small)
    proposed = tables.host.proposed_now
    now = max(int(clock[Clock.NOW]), 0 if proposed is None else int(proposed))
    return GroupSource(
        config,
        parts,
        of_slabs,
        counts,
        slab_counts,
        clock,
        row_clock,
        seeds,
        hyper,
        index.sketch,
        now,
        RowConstants(rows.meta.clone(), rows.init_data.clone()) if later else None,
    )


def write_initial_rows(source: GroupSource) -> None:
    """Gives rows of copies the values that they lack."""
    if source.unwritten is None:
        return
    slabs = source.slabs
    state = [slab.state[name] for name in (slabs[0].state if slabs else ()) for slab in slabs]
    none = source.tables.new_empty(0)
    for t in range(len(source.config.tables)):
        buckets = source.buckets_of[t].buckets
        meta = source.unwritten.meta[t : t + 1].clone()  # of an index with this table alone
        meta[:, Meta.REGION_BEGIN], meta[:, Meta.REGION_BUCKETS] = 0, buckets.shape[0]
        ops.materialize_(
            IndexTensors.read_only(buckets, source.tables[t : t + 1], meta),
            RowTensors(
                [slab.weights for slab in slabs],
                [slab.generations for slab in slabs],
                state,
                none,
                source.hyper[t : t + 1],
                meta,
                source.unwritten.init_data,
                [],
            ),
        )


class OccupiedSlots(NamedTuple):
    """Ids of a piece of an index.

    Attributes:
        slots: int64 [n], ascending: bucket * 4 + slot.
        ids: int64 [n].
        stored: int64 [n], a handle or a count, and 1.
    """

    slots: Tensor
    ids: Tensor
    stored: Tensor


def occupied_slots(buckets: Tensor) -> Iterator[OccupiedSlots]:
    """The ids of a table, piece by piece, on the CPU.

    Args:
        buckets: int64 [buckets, 8].
    """
    for begin in range(0, buckets.shape[0], _BUCKETS_AT_ONCE):
        piece = buckets[begin : begin + _BUCKETS_AT_ONCE].cpu()
        stored = piece[:, BUCKET_WIDTH:].reshape(-1)
        slots = stored.nonzero()[:, 0]
        ids = piece[:, :BUCKET_WIDTH].reshape(-1)
        yield OccupiedSlots(slots + begin * BUCKET_WIDTH, ids[slots], stored[slots])


def tombstones(buckets: Tensor) -> Tensor:
    """What erased ids have left in an index, int64 [n, 2]: slots and keys."""
    found = [torch.empty(0, 2, dtype=torch.int64)]
    for begin in range(0, buckets.shape[0], _BUCKETS_AT_ONCE):
        piece = buckets[begin : begin + _BUCKETS_AT_ONCE].cpu()
        keys = piece[:, :BUCKET_WIDTH].reshape(-1)
        left = (keys != 0) & (piece[:, BUCKET_WIDTH:].reshape(-1) == 0)
        slots = left.nonzero()[:, 0]
        found.append(torch.stack([slots + begin * BUCKET_WIDTH, keys[slots]], 1))
    return torch.cat(found)


class RowOrder:
    """Whose the rows of a slab are: at most 17 bytes for every row.

    Args:
        source: the group.
        slab: its number.
    """

    def __init__(self, source: GroupSource, slab: int) -> None:
        used = source.slabs[slab].weights.shape[0]
        config = source.config
        tables = [t for t in range(len(config.tables)) if config.slab_of(t) == slab]
        buckets = max((source.buckets_of[t].buckets.shape[0] for t in tables), default=0)
        slot_dtype = torch.int32 if buckets * BUCKET_WIDTH < 1 << 31 else torch.int64
        owner_dtype = torch.uint8 if len(tables) < 255 else torch.int32
        self.ids = torch.zeros(used, dtype=torch.int64)
        self.slots = torch.zeros(used, dtype=slot_dtype)
        owner = torch.zeros(used, dtype=owner_dtype)  # 0: nobody's
        for k, t in enumerate(tables):
            for piece in occupied_slots(source.buckets_of[t].buckets):
                rows = (piece.stored - 1) >> GENERATION_BITS
                self.ids[rows] = piece.ids
                self.slots[rows] = piece.slots.to(slot_dtype)
                owner[rows] = k + 1
        counts = [int(source.tables[t, Table.SIZE]) for t in tables]
        rows_by_table = [None] if counts == [used] else _rows_by_owner(owner, counts)
        self._rows = dict(zip(tables, rows_by_table, strict=True))

    def rows_of(self, table: int) -> Tensor | None:
        """The row numbers of a table, ascending; None: all rows of the slab are its own."""
        return self._rows[table]


def _rows_by_owner(owner: Tensor, counts: list[int]) -> list[Tensor]:
    """Row numbers by owner, ascending.

    Args:
        owner: integer [rows], from 1; 0: nobody's.
        counts: how many rows each has.
    """
    dtype = torch.int32 if owner.shape[0] < 1 << 31 else torch.int64
    result = [torch.empty(count, dtype=dtype) for count in counts]
    filled = [0] * len(counts)
    for begin in range(0, owner.shape[0], _ROWS_AT_ONCE):
        piece = owner[begin : begin + _ROWS_AT_ONCE]
        order = torch.argsort(piece, stable=True).add_(begin)
        first, *here = torch.bincount(piece, minlength=len(counts) + 1).tolist()
        for k, rows in enumerate(order[first:].split(here)):
            result[k][filled[k] : filled[k] + here[k]] = rows
            filled[k] += here[k]
    return result


def _ranges(rows: range, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Pieces of a range of rows: where they begin and end."""
    step = max(1, PIECE_BYTES // row_bytes)
    for begin in range(rows.start, rows.stop, step):
        yield begin, min(begin + step, rows.stop)


class TableSource:
    """The ids of a table and what belongs to them, in the order of their rows, or of the ids.

    Its methods give values of a range of them, piece by piece.

    Args:
        source: the group.
        table: its number.
        order: of its slab.
        by_id: ids ascend; else rows do.
    """

    def __init__(
        self, source: GroupSource, table: int, order: RowOrder, *, by_id: bool = False
    ) -> None:
        slab = source.config.slab_of(table)
        self._slab, self._scores = source.slabs[slab], source.buckets_of[table].scores
        self._order = order
        self._rows = order.rows_of(table)
        if by_id:
            ids = order.ids if self._rows is None else order.ids[self._rows.long()]
            places = torch.argsort(ids)
            self._rows = places if self._rows is None else self._rows[places]
        self._ascends = not by_id
        self.count = order.ids.shape[0] if self._rows is None else self._rows.shape[0]
        self._buffer: Tensor | None = None

    @property
    def wide_slots(self) -> bool:
        """Whether slots take 8 bytes, not 4."""
        return self._order.slots.dtype == torch.int64

    def _numbers(self, begin: int, end: int) -> Tensor | slice:
        """Rows of some ids: a slice where they follow each other."""
        if self._rows is None:
            return slice(begin, end)
        rows = self._rows[begin:end]
        first, last = int(rows[0]), int(rows[-1])
        if last - first != end - begin - 1:
            return rows
        follow = self._ascends or bool((rows[1:] > rows[:-1]).all())
        return slice(first, last + 1) if follow else rows

    def ids(self, rows: range) -> Iterator[Tensor]:
        """int64 [n] each."""
        yield from self._pieces(rows, self._order.ids)

    def slots(self, rows: range) -> Iterator[Tensor]:
        """int32 or int64 [n] each: where the ids stand in the index."""
        yield from self._pieces(rows, self._order.slots)

    def handles(self, rows: range) -> Iterator[Tensor]:
        """int64 [n] each."""
        for begin, end in _ranges(rows, 8):
            numbers = self._numbers(begin, end)
            if isinstance(numbers, slice):
                places = torch.arange(numbers.start, numbers.stop)
                generations = self._slab.generations[numbers]
            else:
                places = numbers.long()
                generations = self._slab.generations[places.to(self._slab.generations.device)]
            yield (places << GENERATION_BITS) | generations.cpu().long()

    def weights(self, rows: range) -> Iterator[Tensor]:
        """[n, columns] each."""
        yield from self._pieces(rows, self._slab.weights)

    def state(self, rows: range, name: str) -> Iterator[Tensor]:
        """[n] or [n, columns] each."""
        yield from self._pieces(rows, self._slab.state[name])

    def scores(self, rows: range, word: int) -> Iterator[Tensor]:
        """int64 [n] each; ``word`` is one of those that the group keeps."""
        for slots in self.slots(rows):
            places = slots.long()
            flat = self._scores.reshape(-1)
            at = places // BUCKET_WIDTH * self._scores.shape[1] + word * BUCKET_WIDTH
            yield flat[(at + places % BUCKET_WIDTH).to(flat.device)].cpu()

    def _pieces(self, rows: range, values: Tensor) -> Iterator[Tensor]:
        """Values of the rows; each piece is valid until the next one is asked for."""
        row_bytes = values.element_size() * (values[:1].numel() if values.shape[0] > 0 else 1)
        for begin, end in _ranges(rows, row_bytes):
            numbers = self._numbers(begin, end)
            if isinstance(numbers, slice):
                yield values[numbers].cpu()
            else:
                yield self._gathered(values, numbers.to(values.device)).cpu()

    def _gathered(self, values: Tensor, rows: Tensor) -> Tensor:
        """Rows in a buffer that is used again and again: new memory costs more than the copy."""
        buffer = self._buffer
        if (
            buffer is None
            or (buffer.dtype, buffer.shape[1:]) != (values.dtype, values.shape[1:])
            or buffer.shape[0] < rows.shape[0]
        ):
            buffer = self._buffer = values.new_empty((rows.shape[0], *values.shape[1:]))
        out = buffer[: rows.shape[0]]
        return torch.index_select(values, 0, rows, out=out)


__all__ = [
    "PIECE_BYTES",
    "GroupSource",
    "IndexTable",
    "OccupiedSlots",
    "RowConstants",
    "RowOrder",
    "SlabRows",
    "TableSource",
    "occupied_slots",
    "source_of",
    "tombstones",
    "write_initial_rows",
]
