"""Exchange of saved rows of a dynamic table, to the ranks that own their ids now.

Ids are sent first, so that all ranks know of errors before any table changes. Rows follow in blocks
of some megabytes, which are written as they arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb.checkpoint.reading.column_shards import combined_by_row
from torch_dynemb.distributed.exchange import move_rows, one_to_each
from torch_dynemb.distributed.owners import part_of
from torch_dynemb.distributed.ranks import from_all_ranks, rank_group
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.load import RowBlock
from torch_dynemb.torchrec.state.saved_rows import Rows, StateDictRows
from torch_dynemb.torchrec.state.shard_places import Place
from torch_dynemb.torchrec.state.table_state import (
    Layout,
    TableShape,
    splits_by_column,
    state_key,
)

BLOCK_BYTES = 8 << 20
_IDS_OF_A_BLOCK = BLOCK_BYTES // 8
# State with one value per row, by name and by saved column shard: the number of columns taken from
# that shard, and its values, [ids].
_Pieces = dict[str, dict[int, tuple[int, Tensor]]]


class Arriving(NamedTuple):
    """Ids that a place of this rank will receive.

    Attributes:
        ids: int64 [n], ascending, with a row.
        counted: ids without a row; None: the table does not count single ids, or none were saved.
    """

    ids: Tensor
    counted: CountedIds | None


class _Source(NamedTuple):
    """Saved rows to send.

    Attributes:
        here: those on this rank.
        none: zero rows with the same entries.
        sizes: rows of every part of every rank, by rank.
    """

    here: list[Rows]
    none: Rows
    sizes: list[list[int]]

    def exchanges(self, size: int) -> int:
        """Return the number of block exchanges until all ranks have sent their rows."""
        return max(sum(-(-part // size) for part in parts) for parts in self.sizes)


class TableLoad:
    """Exchange of one table's rows. All ranks of the group call the methods in their order here.

    Args:
        shape: of the table now.
        entries: as :func:`save_table` made them, with rows sharded in any way; or ``weight`` alone,
            rows of ids 0, 1, ...
        layout: saved with the entries; None: ``weight`` alone.
        device: of the rows.
    """

    def __init__(
        self,
        shape: TableShape,
        entries: Mapping[str, Any],
        layout: Layout | None,
        *,
        process_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._shape = shape
        ranks = rank_group(process_group)
        assert ranks is not None
        self._process_group = process_group
        self._ranks = ranks
        self._device = device
        self._saved = StateDictRows(shape, entries, layout, ranks)
        self._sources: list[_Source] = []
        self._stays: dict[int, bool] = {}
        self._places: dict[int, list[Place]] = {}
        for place in shape.places:
            self._places.setdefault(place.column_shard, []).append(place)
        self.arriving: dict[Place, Arriving] = {}

    @property
    def state_names(self) -> set[str]:
        """Names of the optimizer state that blocks have."""
        return {tensor.name for tensor in self._saved.state}

    def check(self) -> None:
        """Send the ids to their places and set ``arriving``: the ids for places of this rank.

        Raises:
            ValueError: the entries contradict each other; on all ranks.
        """
        counted = self._find_sources()
        damaged = ""
        for number, places in self._places.items():
            ids: Tensor | None = None
            for k, _, _ in self._overlapping(places[0]):
                source = self._sources[k]
                bare = _Source(
                    [Rows(rows.ids, {}) for rows in source.here],
                    Rows(source.none.ids, {}),
                    source.sizes,
                )
                found = _ascending(self._collected(bare, number).ids)
                same = ids is None or torch.equal(ids, found)
                if not same or not _all_ascend(found):  # unless it ascends, an id is repeated
                    damaged = "ids are repeated, or those of its columns differ"
                ids = found
            assert ids is not None
            waiting = None
            if counted:
                moved = self._collected(counted[self._overlapping(places[0])[0][0]], number)
                order = torch.argsort(moved.ids)
                waiting = CountedIds(moved.ids[order], moved.values["count"][order, 0])
            mine = self._mine(places)
            if mine is not None:
                self.arriving[mine] = Arriving(ids, waiting)
        self._agree_on(damaged)

    def blocks(self) -> Iterator[tuple[Place, RowBlock]]:
        """Yield blocks of rows for places of this rank, until all rows and columns have come.

        Collective: every rank must exhaust the iterator.
        """
        for number, places in self._places.items():
            mine = self._mine(places)
            overlapping = self._overlapping(places[0])
            whole = [tensor for tensor in self._saved.state if not splits_by_column(tensor)]
            merged: _Pieces = {}
            for which, (k, begin, end) in enumerate(overlapping):
                saved = self._saved.columns[k].begin
                source = self._cut(self._sources[k], begin - saved, end - saved)
                for rows in self._exchanged(source, number, self._block_rows(source.none)):
                    if mine is None or rows.ids.numel() == 0:
                        continue
                    values = rows.values
                    state = {
                        tensor.name: values[state_key(tensor.name)] for tensor in self._saved.state
                    }
                    if len(overlapping) > 1:
                        ids = self.arriving[mine].ids
                        places_of = torch.searchsorted(ids, rows.ids)
                        for tensor in whole:
                            of_row = state.pop(tensor.name)[:, 0]
                            pieces = merged.setdefault(tensor.name, {})
                            if which not in pieces:
                                pieces[which] = end - begin, of_row.new_zeros(ids.shape)
                            pieces[which][1][places_of] = of_row
                    scores = values.get("metadata") if which == 0 else None
                    first = begin - places[0].first_column
                    yield mine, RowBlock(rows.ids, first, values["weight"], state, scores)
            if mine is not None and merged:
                yield from self._merged_blocks(mine, merged)

    def _merged_blocks(self, mine: Place, merged: _Pieces) -> Iterator[tuple[Place, RowBlock]]:
        ids = self.arriving[mine].ids
        values = {
            name: combined_by_row(list(pieces.values()))[:, None] for name, pieces in merged.items()
        }
        for block in Rows(ids, values).blocks(_IDS_OF_A_BLOCK):
            nothing = torch.empty((block.ids.numel(), 0), device=self._device)
            yield mine, RowBlock(block.ids, 0, nothing, block.values, None)

    # -- sources --------------------------------------------------------------------------------

    def _find_sources(self) -> list[_Source]:
        """Set ``_sources`` and ``_stays``; return the sources of counted ids.

        Raises:
            ValueError: on all ranks, if one of them has an error.
        """
        rows: list[list[Rows]] = []
        counted: list[list[Rows]] = []
        error = ""
        try:
            rows, counted = self._saved.rows(), self._saved.counted()
        except ValueError as raised:
            error = str(raised)
        stays = {number: self._all_mine(rows + counted, number) for number in self._places}
        sizes = [[[part.ids.numel() for part in parts] for parts in of] for of in (rows, counted)]
        gathered = from_all_ranks((error, stays, sizes), self._process_group)
        self._raise_for([of_rank[0] for of_rank in gathered])
        self._stays = {number: all(of[1][number] for of in gathered) for number in self._places}
        self._sources = [
            _Source(of, self._saved.none(k), [of_rank[2][0][k] for of_rank in gathered])
            for k, of in enumerate(rows)
        ]
        none = Rows(torch.empty(0, dtype=torch.int64), {"count": torch.empty(0, 1).long()})
        return [
            _Source(of, none, [of_rank[2][1][k] for of_rank in gathered])
            for k, of in enumerate(counted)
        ]

    def _all_mine(self, rows: list[list[Rows]], number: int) -> bool:
        """Return whether all ids of this rank stay on it, for a column shard."""
        places = self._places[number]
        for parts in rows:
            for part in parts:
                for block in part.blocks(_IDS_OF_A_BLOCK):
                    if not bool((self._ranks_of(block.ids, places) == self._ranks.rank).all()):
                        return False
        return True

    def _overlapping(self, place: Place) -> list[tuple[int, int, int]]:
        """Return (number, first column, end) of saved column shards that overlap a place's
        columns."""
        found = []
        for k, saved in enumerate(self._saved.columns):
            begin = max(saved.begin, place.first_column)
            end = min(saved.end, place.first_column + place.columns)
            if begin < end:
                found.append((k, begin, end))
        return found

    def _mine(self, places: list[Place]) -> Place | None:
        """Return the place of this rank among those of a column shard."""
        return next((place for place in places if place.rank == self._ranks.rank), None)

    def _agree_on(self, error: str) -> None:
        """Raise ValueError on all ranks if one has an error."""
        self._raise_for(from_all_ranks(error, self._process_group))

    def _raise_for(self, errors: list[str]) -> None:
        found = [f"{text} (rank {rank})" for rank, text in enumerate(errors) if text]
        if found:
            raise ValueError(
                f"table {self._shape.name!r}: the entries of the state contradict each other: "
                f"{'; '.join(found)}"
            )

    # -- moves ----------------------------------------------------------------------------------

    def _cut(self, source: _Source, begin: int, end: int) -> _Source:
        """Return some columns of a saved column shard."""
        here = [self._saved.cut(rows, begin, end) for rows in source.here]
        return source._replace(here=here, none=self._saved.cut(source.none, begin, end))

    def _block_rows(self, none: Rows) -> int:
        """Return the rows of a block; a rank may receive one block from every other rank."""
        bytes_of_row = 8 + sum(
            value.shape[1] * value.element_size() for value in none.values.values()
        )
        return max(1024, BLOCK_BYTES // (bytes_of_row * self._ranks.size))

    def _collected(self, source: _Source, number: int) -> Rows:
        """Collect all rows that come to this rank."""
        parts = list(self._exchanged(source, number, _IDS_OF_A_BLOCK))
        if len(parts) == 1:
            return parts[0]
        none = self._ready(source.none, source.none)
        parts = [none, *parts]
        return Rows(
            torch.cat([part.ids for part in parts]),
            {name: torch.cat([part.values[name] for part in parts]) for name in none.values},
        )

    def _exchanged(self, source: _Source, number: int, size: int) -> Iterator[Rows]:
        """Send rows to the places of a column shard that own their ids; yield received rows."""
        blocks = (block for rows in source.here for block in rows.blocks(size))
        if self._stays[number]:
            for block in blocks:
                yield self._ready(block, source.none)
            return
        for _ in range(source.exchanges(size)):
            block = self._ready(next(blocks, source.none), source.none)
            yield self._exchange(block, self._places[number])

    def _ready(self, rows: Rows, like: Rows) -> Rows:
        """Return rows on the device and in the dtypes of the table."""
        return Rows(
            rows.ids.to(self._device).contiguous(),
            {
                name: value.to(device=self._device, dtype=like.values[name].dtype)
                for name, value in rows.values.items()
            },
        )

    def _ranks_of(self, ids: Tensor, places: list[Place]) -> Tensor:
        """Return the rank of the place that owns each id."""
        rank_of = torch.tensor([place.rank for place in places], device=ids.device)
        if len(places) == 1:
            return rank_of.expand(ids.shape)
        return rank_of[part_of(ids.contiguous(), len(places))]

    def _exchange(self, rows: Rows, places: list[Place]) -> Rows:
        target = self._ranks_of(rows.ids, places)
        order = torch.argsort(target, stable=True) if len(places) > 1 else None
        lengths = torch.bincount(target, minlength=self._ranks.size)
        sent, received = lengths.tolist(), one_to_each(lengths, self._ranks).tolist()

        def move(values: Tensor) -> Tensor:
            sorted_values = values if order is None else values[order]
            return move_rows(sorted_values, received, sent, self._ranks)

        return Rows(
            move(rows.ids), {name: move(value) for name, value in sorted(rows.values.items())}
        )


def _all_ascend(ids: Tensor) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def _ascending(ids: Tensor) -> Tensor:
    """Return sorted ids; the same tensor if it ascends already."""
    return ids if _all_ascend(ids) else ids.sort().values


__all__ = ["BLOCK_BYTES", "Arriving", "TableLoad"]
