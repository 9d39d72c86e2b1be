"""Ids, rows, state and scores of a table, read piece by piece by a save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torch_dynemb.checkpoint.saving.row_order import RowOrder
from torch_dynemb.checkpoint.saving.source import GroupSource
from torch_dynemb.checkpoint.saving.stored_rows import StoredRows
from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS, GENERATION_MASK
from torch_dynemb.ops.row_copies import rows_on_host
from torch_dynemb.table.copy_on_write import CopyOnWriteRows
from torch_dynemb.table.row_batch import RowBatch

PIECE_BYTES = 8 << 20
ROWS_BYTES = 4 << 20  # read with their state at once: at most a window of DirectDisk
# Returns memory for the weights and each state tensor of so many rows; None where there is none.
RoomForRows = Callable[[int], Sequence[Tensor | None]]


def _ranges(rows: range, row_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Split a range of rows into pieces. Yield begin and end of each."""
    step = max(1, piece_bytes // row_bytes)
    for begin in range(rows.start, rows.stop, step):
        yield begin, min(begin + step, rows.stop)


class TableSource:
    """Ids of a table with their rows, state and scores, ordered by row or by id.

    Methods return values of a range of them, piece by piece.

    Args:
        source: the group.
        table: number of the table.
        order: owners of the rows of its slab.
        by_id: whether to order by id, not by row.
    """

    def __init__(
        self, source: GroupSource, table: int, order: RowOrder, *, by_id: bool = False
    ) -> None:
        slab = source.config.slab_of(table)
        self._table = table
        self._slab, self._scores = source.slabs[slab], source.scores(table)
        self._order = order
        self._rows = order.rows_of(table)
        if by_id:
            ids = order.ids if self._rows is None else order.ids[self._rows.long()]
            places = torch.argsort(ids)
            self._rows = places if self._rows is None else self._rows[places]
        self._ascends = not by_id
        self.count = order.ids.shape[0] if self._rows is None else self._rows.shape[0]
        self._buffer: Tensor | None = None

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

    def ids(self, rows: range) -> Iterator[Tensor]:
        """Iterate over ids, int64 [n] each."""
        yield from self._pieces(rows, self._order.ids)

    def _handles(self, numbers: Tensor | slice) -> Tensor:
        stored = self._slab.reader is not None
        of_rows = self._order.generations if stored else self._slab.generations
        if isinstance(numbers, slice):
            places = torch.arange(numbers.start, numbers.stop, device="cpu")
            generations = of_rows[numbers]
        else:
            places = numbers.long()
            generations = of_rows[places.to(of_rows.device)]
        return (places << GENERATION_BITS) | generations.cpu().long()

    def weights(self, rows: range) -> Iterator[Tensor]:
        """Iterate over weights in the tensors of the slab, [n, columns] each."""
        yield from self._pieces(rows, self._slab.weights)

    def state(self, rows: range, name: str) -> Iterator[Tensor]:
        """Iterate over a state tensor of the slab, [n, columns] each."""
        yield from self._pieces(rows, self._slab.state[name])

    def rows_and_state(
        self, rows: range, reader: StoredRows | CopyOnWriteRows, room: RoomForRows
    ) -> Iterator[RowBatch]:
        """Iterate over weights and state together. Each piece is valid until the next one.

        Args:
            rows: rows of the table.
            reader: reader of the slab.
            room: called before each piece of rows in memory.
        """
        for begin, end in _ranges(rows, self._slab.row_bytes, ROWS_BYTES):
            numbers = self._numbers(begin, end)
            places = numbers if isinstance(numbers, slice) else numbers.long()
            ids, handles = self._order.ids[places], self._handles(numbers)
            if isinstance(reader, StoredRows):
                yield reader.read(self._table, ids, handles)
            else:
                written = self._slab.generations[places] == (handles & GENERATION_MASK)
                yield reader.read(self._table, ids, handles, written, room(end - begin))

    def scores(self, rows: range, word: int) -> Iterator[Tensor]:
        """Iterate over scores, int64 [n] each; ``word`` is the index of one that the group
        keeps.
        """
        for slots in self._pieces(rows, self._order.slots):
            places = slots.long()
            flat = self._scores.reshape(-1)
            at = places // BUCKET_WIDTH * self._scores.shape[1] + word * BUCKET_WIDTH
            yield flat[(at + places % BUCKET_WIDTH).to(flat.device)].cpu()

    def _pieces(self, rows: range, values: Tensor) -> Iterator[Tensor]:
        """Iterate over values of the rows. Each piece is valid until the next one is requested."""
        row_bytes = values.element_size() * (values[:1].numel() if values.shape[0] > 0 else 1)
        for begin, end in _ranges(rows, row_bytes, PIECE_BYTES):
            numbers = self._numbers(begin, end)
            if isinstance(numbers, slice):
                yield rows_on_host(values[numbers])
            else:
                yield self._gathered(values, numbers.to(values.device)).cpu()

    def _gathered(self, values: Tensor, rows: Tensor) -> Tensor:
        """Gather rows into a reused buffer: new memory costs more than the copy."""
        buffer = self._buffer
        if (
            buffer is None
            or (buffer.dtype, buffer.shape[1:]) != (values.dtype, values.shape[1:])
            or buffer.shape[0] < rows.shape[0]
        ):
            buffer = self._buffer = values.new_empty((rows.shape[0], *values.shape[1:]))
        out = buffer[: rows.shape[0]]
        return torch.index_select(values, 0, rows, out=out)


__all__ = ["PIECE_BYTES", "RoomForRows", "TableSource"]
