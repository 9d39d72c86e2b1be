"""Exchange of a table's rows between ranks: from the shards that have them to those of a plan.

A table's rows come from column shards, and go to places: other column shards, each divided by ids.
Rows travel in blocks of some megabytes. All ranks call everything here together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb.distributed.exchange import RowsUnderWay, start_rows
from torch_dynemb.distributed.owners import part_of
from torch_dynemb.distributed.ranks import from_all_ranks
from torch_dynemb.optim.base import StateTensor
from torch_dynemb.rows.column_shards import combined_by_row
from torch_dynemb.table.row_batch import RowBatch

BLOCK_BYTES = 8 << 20  # of a block that a rank receives; up to three are on their way
MOST_BYTES = 64 << 20  # of blocks with few large rows
_LEAST_ROWS = 1024
IDS_OF_A_BLOCK = BLOCK_BYTES // 8
# State with one value per row, by name and by source: the number of columns taken from that column
# shard, and its values, [ids, 1].
_Pieces = dict[str, dict[int, tuple[int, Tensor]]]
T = TypeVar("T")


class Place(NamedTuple):
    """Shard of a table and its rank.

    Attributes:
        column_shard: number among the column shards.
        first_column: in rows of the whole table.
        columns: number of columns.
        part: number of its part of the ids; all places with the same columns have one part each.
        rank: the rank with the shard.
    """

    column_shard: int
    first_column: int
    columns: int
    part: int
    rank: int


class RowBlocks(Protocol):
    """Rows that this rank has.

    Attributes:
        ids: int64 [n].
    """

    @property
    def ids(self) -> Tensor: ...

    def blocks(self, size: int) -> Iterator[RowBatch]:
        """Yield all rows, at most ``size`` at a time."""


class Sent(NamedTuple):
    """Rows to send.

    Attributes:
        here: those on this rank.
        none: zero rows, with the same state and scores.
        sizes: rows of every part of every rank, by rank.
        stays: by column shard of the places, whether no row leaves its rank.
    """

    here: Sequence[RowBlocks]
    none: RowBatch
    sizes: list[list[int]]
    stays: dict[int, bool]

    def exchanges(self, size: int) -> int:
        """Return the number of block exchanges until all ranks have sent their rows."""
        return max(sum(-(-part // size) for part in parts) for parts in self.sizes)


class ArrivedBlock(NamedTuple):
    """Rows that have come to a place of this rank.

    Attributes:
        place: the place.
        batch: the rows.
        numbers: int64 [n], of the rows among the ids that the place takes, ascending.
    """

    place: Place
    batch: RowBatch
    numbers: Tensor


class _Moving:
    """A block on its way.

    Args:
        rows: of this rank, by the rank that gets them.
        sent: number of rows for each rank.
        lengths: the numbers of rows that come from each rank, on their way.

    Attributes:
        arriving: its tensors on their way, as :func:`_tensors` gives them.
    """

    def __init__(self, rows: RowBatch, sent: list[int], lengths: RowsUnderWay) -> None:
        self.rows, self.sent, self.lengths = rows, sent, lengths
        self.arriving: list[RowsUnderWay] = []

    def arrived(self) -> RowBatch:
        """Wait for the rows of other ranks, and return them."""
        return _batch([arriving.wait() for arriving in self.arriving], self.rows)


def _tensors(batch: RowBatch) -> list[Tensor]:
    """Return the tensors that are sent: scores together, and none without columns."""
    words = [torch.stack(list(batch.scores.values()), 1)] if batch.scores else []
    rows = [batch.rows] if len(batch.columns) > 0 else []
    return [batch.ids, *rows, *batch.state.values(), *words]


def _batch(tensors: list[Tensor], like: RowBatch) -> RowBatch:
    """Return the batch of the tensors of one that is like another."""
    ids, *others = tensors
    words = others.pop().unbind(1) if like.scores else ()
    rows = others.pop(0) if len(like.columns) > 0 else ids.new_empty(ids.numel(), 0)
    state = dict(zip(like.state, others, strict=True))
    return RowBatch(ids, rows, state, dict(zip(like.scores, words, strict=True)))


class RowExchange:
    """Exchange of the rows of one table.

    Args:
        places: shards that get the rows.
        columns: column shards that have them.
        state: optimizer state of the rows.
        process_group: of all shards.
        device: of the rows.

    Attributes:
        failure: the first error of a source of rows on this rank. Other rows are not sent after it,
            but the exchange goes on, because other ranks take part in it. Raise it afterwards, on
            all ranks.
        sent_bytes: sent by this rank to others.
    """

    def __init__(
        self,
        places: Sequence[Place],
        columns: Sequence[range],
        state: Sequence[StateTensor],
        *,
        process_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._process_group, self._device = process_group, device
        self._rank, self._size = process_group.rank(), process_group.size()
        self._columns = columns
        self._split = {tensor.name for tensor in state if tensor.splits_by_column}
        self.places: dict[int, list[Place]] = {}
        for place in places:
            self.places.setdefault(place.column_shard, []).append(place)
        self.failure: Exception | None = None
        self.sent_bytes = 0

    def raise_failure(self) -> None:
        """Raise the error of a source of rows on this rank, if there was one."""
        if self.failure is not None:
            raise self.failure

    def mine(self, number: int) -> Place | None:
        """Return the place of this rank among those of a column shard; None: it has none."""
        return next((place for place in self.places[number] if place.rank == self._rank), None)

    def overlapping(self, place: Place) -> list[tuple[int, int, int]]:
        """Return (number, first column, end) of the sources that overlap a place's columns."""
        found = []
        for k, source in enumerate(self._columns):
            begin = max(source.start, place.first_column)
            end = min(source.stop, place.first_column + place.columns)
            if begin < end:
                found.append((k, begin, end))
        return found

    def sent(self, here: Sequence[RowBlocks], none: RowBatch) -> Sent:
        """Tell all ranks how many rows each one sends.

        Args:
            here: rows of this rank.
            none: zero rows, with the same state and scores.
        """
        stays = {number: self._all_mine(here, number) for number in self.places}
        sizes = [part.ids.numel() for part in here]
        gathered = from_all_ranks((stays, sizes), self._process_group)
        return Sent(
            here,
            none,
            [of_rank[1] for of_rank in gathered],
            {number: all(of_rank[0][number] for of_rank in gathered) for number in self.places},
        )

    def collected(self, sent: Sent, number: int) -> RowBatch:
        """Collect all rows that come to this rank.

        Args:
            sent: rows of all ranks.
            number: column shard of the places.
        """
        parts = list(self._exchanged(sent, number, self._block_rows(sent.none)))
        return RowBatch.joined(parts or [self._ready(sent.none, sent.none)])

    def blocks(
        self, sources: Sequence[Sent], arriving: Mapping[Place, Tensor]
    ) -> Iterator[ArrivedBlock]:
        """Yield blocks of rows for places of this rank, until all rows and columns have come.

        Every rank must exhaust the iterator.

        Args:
            sources: rows by column shard that has them.
            arriving: int64 [n] by place of this rank, ascending: the ids that it takes. Rows of
                other ids are skipped.
        """
        for number, places in self.places.items():
            mine = self.mine(number)
            overlapping = self.overlapping(places[0])
            merged: _Pieces = {}
            for which, (k, begin, end) in enumerate(overlapping):
                first = self._columns[k].start
                cut = slice(begin - first, end - first)
                size = self._block_rows(self._cut(sources[k].none, cut))
                for arrived in self._exchanged(sources[k], number, size, cut):
                    if mine is None or arrived.ids.numel() == 0:
                        continue
                    ids = arriving[mine]
                    rows, numbers = _taken(arrived, ids)
                    state = dict(rows.state)
                    for name in rows.state.keys() - self._split if len(overlapping) > 1 else ():
                        of_row = state.pop(name)
                        pieces = merged.setdefault(name, {})
                        if which not in pieces:
                            pieces[which] = end - begin, of_row.new_zeros(ids.numel(), 1)
                        pieces[which][1][numbers] = of_row
                    batch = rows._replace(
                        state=state,
                        scores=rows.scores if which == 0 else {},
                        first_column=begin - places[0].first_column,
                    )
                    yield ArrivedBlock(mine, batch, numbers)
            if mine is not None and merged:
                yield from self._merged_blocks(mine, arriving[mine], merged)

    def _merged_blocks(self, mine: Place, ids: Tensor, merged: _Pieces) -> Iterator[ArrivedBlock]:
        state = {name: combined_by_row(list(pieces.values())) for name, pieces in merged.items()}
        whole = RowBatch(ids, torch.empty((ids.numel(), 0), device=self._device), state)
        numbers = torch.arange(ids.numel(), device=ids.device)
        for begin in range(0, ids.numel(), IDS_OF_A_BLOCK):
            some = slice(begin, begin + IDS_OF_A_BLOCK)
            yield ArrivedBlock(mine, whole.picked(some), numbers[some])

    # -- moves ----------------------------------------------------------------------------------

    def _all_mine(self, rows: Sequence[RowBlocks], number: int) -> bool:
        """Return whether all ids of this rank stay on it, for a column shard."""
        places = self.places[number]
        for part in rows:
            for ids in part.ids.split(IDS_OF_A_BLOCK):
                if not bool((self._ranks_of(ids, places) == self._rank).all()):
                    return False
        return True

    def _cut(self, rows: RowBatch, columns: slice | None) -> RowBatch:
        """Return some columns of rows; None: all."""
        if columns is None:
            return rows
        state = {
            name: values[:, columns] if name in self._split else values
            for name, values in rows.state.items()
        }
        return rows._replace(rows=rows.rows[:, columns], state=state)

    def _block_rows(self, none: RowBatch) -> int:
        """Return the rows of a block; a rank may receive one block from every other rank."""
        of_ranks = _row_bytes(none) * self._size
        return max(1, min(_LEAST_ROWS, MOST_BYTES // of_ranks), BLOCK_BYTES // of_ranks)

    def _exchanged(
        self, sent: Sent, number: int, size: int, columns: slice | None = None
    ) -> Iterator[RowBatch]:
        """Send rows to the places of a column shard that own their ids; yield received rows."""
        blocks = (block for rows in sent.here for block in rows.blocks(size))

        def following() -> RowBatch | None:
            try:
                block = next(blocks, None)
                return None if block is None else self._ready(self._cut(block, columns), sent.none)
            except Exception as error:
                self.failure = self.failure or error
                blocks.close()
                return None

        none = self._ready(self._cut(sent.none, columns), sent.none)
        if sent.stays[number]:
            while (block := following()) is not None:
                yield block
            return
        # A block is read while the one before is sent and the one before that is used.
        moving: deque[_Moving] = deque()
        for _ in range(sent.exchanges(size)):
            block = following()
            moving.append(self._begin(none if block is None else block, self.places[number]))
            if len(moving) > 1:
                self._send(moving[-2])
            if len(moving) > 2:
                yield moving.popleft().arrived()
        if moving:
            self._send(moving[-1])
        while moving:
            yield moving.popleft().arrived()

    def _ready(self, rows: RowBatch, like: RowBatch) -> RowBatch:
        """Return rows on the device and in the dtypes of the table."""
        ready = rows._replace(
            rows=rows.rows.to(like.rows.dtype),
            state={name: rows.state[name].to(of.dtype) for name, of in like.state.items()},
            scores={name: rows.scores[name] for name in like.scores},
        ).to(self._device)
        return ready._replace(ids=ready.ids.contiguous())

    def _ranks_of(self, ids: Tensor, places: list[Place]) -> Tensor:
        """Return the rank of the place that owns each id."""
        rank_of = torch.tensor([place.rank for place in places], device=ids.device)
        if len(places) == 1:
            return rank_of.expand(ids.shape)
        return rank_of[part_of(ids.contiguous(), len(places))]

    def _begin(self, rows: RowBatch, places: list[Place]) -> _Moving:
        """Begin to tell other ranks how many rows of a block they get."""
        target = self._ranks_of(rows.ids, places)
        if len(places) > 1:
            rows = rows.picked(torch.argsort(target, stable=True))
        lengths = torch.bincount(target, minlength=self._size)
        equal = [1] * self._size
        return _Moving(
            rows, lengths.tolist(), start_rows(lengths, equal, equal, self._process_group)
        )

    def _send(self, moving: _Moving) -> None:
        """Begin to send a block."""
        rows, sent, received = moving.rows, moving.sent, moving.lengths.wait().tolist()
        self.sent_bytes += _row_bytes(rows) * (sum(sent) - sent[self._rank])
        group = self._process_group
        moving.arriving = [start_rows(values, received, sent, group) for values in _tensors(rows)]


def _row_bytes(rows: RowBatch) -> int:
    return sum(of.shape[1:].numel() * of.element_size() for of in _tensors(rows))


def use_each(items: Iterable[T], use: Callable[[T], None]) -> Exception | None:
    """Call a function for each item, and exhaust the iterable also after it has raised.

    Args:
        items: of an exchange that other ranks take part in.
        use: not called any more after an error.

    Returns:
        The error; None: there was none.
    """
    failure: Exception | None = None
    for item in items:
        if failure is None:
            try:
                use(item)
            except Exception as error:
                failure = error
    return failure


def _taken(rows: RowBatch, ids: Tensor) -> tuple[RowBatch, Tensor]:
    """Return the rows of some ids, and their numbers among these ids.

    Args:
        rows: in any order.
        ids: int64 [n], ascending.
    """
    numbers = torch.searchsorted(ids, rows.ids)
    if ids.numel() == 0:
        known = torch.zeros_like(rows.ids, dtype=torch.bool)
    else:
        known = ids[numbers.clamp(max=ids.numel() - 1)] == rows.ids
    if bool(known.all()):
        return rows, numbers
    return rows.picked(known), numbers[known]


__all__ = [
    "BLOCK_BYTES",
    "IDS_OF_A_BLOCK",
    "ArrivedBlock",
    "Place",
    "RowBlocks",
    "RowExchange",
    "Sent",
    "use_each",
]
