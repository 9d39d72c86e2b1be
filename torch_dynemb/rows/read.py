"""Readers of the rows of a table, batch by batch: in the order of files, by id, or in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS, GENERATION_MASK, Table
from torch_dynemb.ops.row_copies import rows_on_host
from torch_dynemb.rows.source import GroupSource, StoredRows
from torch_dynemb.table.content import TableEntries, score_names
from torch_dynemb.table.expiry import Expiry
from torch_dynemb.table.row_access import read_rows
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.tables import Tables, exported

BATCH_BYTES = 8 << 20  # of a batch of rows in memory
# of a batch that is read from a store or during training; each of its tensors fits into a window
# of DirectDisk
ROWS_BYTES = 4 << 20
_BUCKETS_AT_ONCE = 1 << 16
_ROWS_AT_ONCE = 1 << 16
# Returns memory for the weights and each state tensor of so many rows; None where there is none.
RoomForRows = Callable[[int], Sequence[Tensor | None]]


# -- in the order of files -----------------------------------------------------------------------


class OccupiedSlots(NamedTuple):
    """Ids in a piece of an index.

    Attributes:
        slots: int64 [n], ascending: bucket * 4 + slot.
        ids: int64 [n].
        stored: int64 [n], a handle or a count, plus 1.
    """

    slots: Tensor
    ids: Tensor
    stored: Tensor


def occupied_slots(buckets: Tensor) -> Iterator[OccupiedSlots]:
    """Iterate over the ids of a table in pieces, on the CPU.

    Args:
        buckets: int64 [buckets, 8].
    """
    for begin in range(0, buckets.shape[0], _BUCKETS_AT_ONCE):
        piece = buckets[begin : begin + _BUCKETS_AT_ONCE].cpu()
        stored = piece[:, BUCKET_WIDTH:].reshape(-1)
        slots = stored.nonzero()[:, 0]
        ids = piece[:, :BUCKET_WIDTH].reshape(-1)
        yield OccupiedSlots(slots + begin * BUCKET_WIDTH, ids[slots], stored[slots])


class RowOrder:
    """Owners of the rows of a slab, found by a scan of the index.

    Rows are then read in the order in which they lie in memory. It takes at most 17 bytes per row,
    and 21 for rows in a store or read during training.

    Args:
        source: the group.
        slab: number of the slab.
    """

    def __init__(self, source: GroupSource, slab: int) -> None:
        used = source.slabs[slab].used
        stored = source.slabs[slab].reader is not None
        config = source.config
        tables = [t for t in range(len(config.tables)) if config.slab_of(t) == slab]
        index = [source.buckets(t) for t in tables]
        buckets = max((of.shape[0] for of in index), default=0)
        slot_dtype = torch.int32 if buckets * BUCKET_WIDTH < 1 << 31 else torch.int64
        owner_dtype = torch.uint8 if len(tables) < 255 else torch.int32
        self.ids = torch.zeros(used, dtype=torch.int64, device="cpu")
        self.slots = torch.zeros(used, dtype=slot_dtype, device="cpu")
        owner = torch.zeros(used, dtype=owner_dtype, device="cpu")  # 0: free
        # rows that were copied have their generations beside them
        self.generations = torch.zeros(used if stored else 0, dtype=torch.int32, device="cpu")
        for k, of_table in enumerate(index):
            for piece in occupied_slots(of_table):
                handles = piece.stored - 1
                rows = handles >> GENERATION_BITS
                if stored:
                    self.generations[rows] = (handles & GENERATION_MASK).to(torch.int32)
                self.ids[rows] = piece.ids
                self.slots[rows] = piece.slots.to(slot_dtype)
                owner[rows] = k + 1
        counts = [int(size) for size in source.tables[tables, Table.SIZE]]
        rows_by_table = [None] if counts == [used] else _rows_by_owner(owner, counts)
        self._rows = dict(zip(tables, rows_by_table, strict=True))

    def rows_of(self, table: int) -> Tensor | None:
        """Return the row numbers of a table, ascending; None if it owns all rows of the slab."""
        return self._rows[table]


def _rows_by_owner(owner: Tensor, counts: list[int]) -> list[Tensor]:
    """Group row numbers by owner, ascending.

    Args:
        owner: integer [rows], from 1; 0 for free rows.
        counts: number of rows of each owner.
    """
    dtype = torch.int32 if owner.shape[0] < 1 << 31 else torch.int64
    result = [torch.empty(count, dtype=dtype, device="cpu") for count in counts]
    filled = [0] * len(counts)
    for begin in range(0, owner.shape[0], _ROWS_AT_ONCE):
        piece = owner[begin : begin + _ROWS_AT_ONCE]
        order = torch.argsort(piece, stable=True).add_(begin)
        first, *here = torch.bincount(piece, minlength=len(counts) + 1).tolist()
        for k, rows in enumerate(order[first:].split(here)):
            result[k][filled[k] : filled[k] + here[k]] = rows
            filled[k] += here[k]
    return result


class RowReader:
    """Reader of the rows of a table, with their state and all scores that the group keeps.

    Each row is read once. Rows in memory are views if they are consecutive there.

    Args:
        source: the group.
        table: number of the table.
        order: owners of the rows of its slab.
        by_id: whether to order by id, not by row.

    Attributes:
        count: number of rows.
    """

    def __init__(
        self, source: GroupSource, table: int, order: RowOrder, *, by_id: bool = False
    ) -> None:
        self._table, self._order = table, order
        self._slab, self._scores = source.slabs[source.config.slab_of(table)], source.scores(table)
        self._words = source.config.layout.score_words
        self._rows = order.rows_of(table)
        if by_id:
            ids = order.ids if self._rows is None else order.ids[self._rows.long()]
            places = torch.argsort(ids)
            self._rows = places if self._rows is None else self._rows[places]
        self._ascends = not by_id
        self.count = order.ids.shape[0] if self._rows is None else self._rows.shape[0]
        self._buffers: dict[str, Tensor] = {}

    def batches(self, rows: range, room: RoomForRows) -> Iterator[RowBatch]:
        """Yield some rows on the CPU. Each batch is valid until the next one is requested.

        Args:
            rows: their numbers in the order of the reader.
            room: called before each batch that is read during training.
        """
        slab, reader = self._slab, self._slab.reader
        row_bytes = slab.row_bytes + 8 * (1 + len(self._words))
        step = max(1, (BATCH_BYTES if reader is None else ROWS_BYTES) // row_bytes)
        for begin in range(rows.start, rows.stop, step):
            end = min(begin + step, rows.stop)
            numbers = self._numbers(begin, end)
            ids = self._taken("id", self._order.ids, numbers)
            if reader is None:
                state = {
                    name: self._taken(f"state.{name}", values, numbers)
                    for name, values in slab.state.items()
                }
                batch = RowBatch(ids, self._taken("weight", slab.weights, numbers), state)
            else:
                handles = self._handles(numbers)
                if isinstance(reader, StoredRows):
                    batch = reader.read(self._table, ids, handles)
                else:
                    places = numbers if isinstance(numbers, slice) else numbers.long()
                    written = slab.generations[places] == (handles & GENERATION_MASK)
                    batch = reader.read(self._table, ids, handles, written, room(end - begin))
            yield batch._replace(scores=self._scores_of(numbers)) if self._words else batch

    def _numbers(self, begin: int, end: int) -> Tensor | slice:
        """Return the rows of some ids: a slice if they are consecutive."""
        if self._rows is None:
            return slice(begin, end)
        rows = self._rows[begin:end]
        first, last = int(rows[0]), int(rows[-1])
        if last - first != end - begin - 1:
            return rows
        follow = self._ascends or bool((rows[1:] > rows[:-1]).all())
        return slice(first, last + 1) if follow else rows

    def _taken(self, name: str, values: Tensor, rows: Tensor | slice) -> Tensor:
        """Return rows of a tensor; a copy is in a reused buffer, because new memory costs more."""
        if isinstance(rows, slice):
            return rows_on_host(values[rows])
        rows, buffer = rows.to(values.device), self._buffers.get(name)
        if buffer is None or buffer.shape[0] < rows.shape[0]:
            buffer = self._buffers[name] = values.new_empty((rows.shape[0], *values.shape[1:]))
        return torch.index_select(values, 0, rows, out=buffer[: rows.shape[0]]).cpu()

    def _handles(self, numbers: Tensor | slice) -> Tensor:
        if isinstance(numbers, slice):
            places = torch.arange(numbers.start, numbers.stop, device="cpu")
            generations = self._order.generations[numbers]
        else:
            places = numbers.long()
            generations = self._order.generations[places]
        return (places << GENERATION_BITS) | generations.long()

    def _scores_of(self, numbers: Tensor | slice) -> dict[str, Tensor]:
        """Return the scores of rows, int64 [n] each."""
        slots = self._taken("slot", self._order.slots, numbers).long()
        flat = self._scores.reshape(-1)
        first = slots // BUCKET_WIDTH * self._scores.shape[1] + slots % BUCKET_WIDTH
        return {
            name: flat[(first + word * BUCKET_WIDTH).to(flat.device)].cpu()
            for word, name in enumerate(self._words)
        }


# -- in any order --------------------------------------------------------------------------------


def batches_of(
    tables: Tables,
    table: int,
    size: int,
    *,
    first_column: int = 0,
    state: bool = True,
    scores: bool = True,
    only: Tensor | None = None,
) -> Iterator[RowBatch]:
    """Yield the rows of a table, as copies; in no particular order, each id once.

    Args:
        tables: of the group.
        table: its number.
        size: most ids of a batch.
        first_column: of the whole table that its rows begin with.
        state, scores: whether they are read, too.
        only: int64 [m], ids to read; None: all.
    """
    names = score_names(tables, table) if scores else ()
    expiry = Expiry(tables, table)
    for found in exported(tables, table, max(size, BUCKET_WIDTH)):
        found = expiry.unexpired(found)
        if only is not None:
            found = found.chosen(torch.isin(found.ids, only))
        entries = TableEntries(found.ids, found.handles, found.scores)
        for batch in batches_at(tables, table, entries, size, state=state, scores=names):
            yield batch._replace(first_column=first_column)


def batches_at(
    tables: Tables,
    table: int,
    entries: TableEntries,
    size: int,
    *,
    scores: Sequence[str],
    state: bool = True,
) -> Iterator[RowBatch]:
    """Yield the rows of ids with known handles, as copies, in their order.

    Args:
        tables: of the group.
        table: its number.
        entries: ids with their handles and scores.
        size: most ids of a batch.
        scores: names of the scores of a batch.
        state: whether state is read, too.
    """
    layout = tables.config.layout
    for begin in range(0, entries.ids.numel(), size):
        cut = slice(begin, begin + size)
        ids = entries.ids[cut].clone()
        batch = read_rows(tables, table, ids, entries.handles[cut], state=state)
        words = {name: entries.words[cut, layout.word(name)].clone() for name in scores}
        yield batch._replace(scores=words)


__all__ = [
    "BATCH_BYTES",
    "ROWS_BYTES",
    "RoomForRows",
    "RowOrder",
    "RowReader",
    "batches_at",
    "batches_of",
    "occupied_slots",
]
