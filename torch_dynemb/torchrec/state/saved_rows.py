"""Saved rows of a dynamic table on one rank: ids and views of the entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from torch_dynemb.distributed.owners import rows_of
from torch_dynemb.distributed.ranks import RankGroup
from torch_dynemb.ops.columns import MAX_COUNT
from torch_dynemb.optim.base import StateTensor
from torch_dynemb.rows.exchange import Place
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.score_check import check_score
from torch_dynemb.table.state_check import check_counts
from torch_dynemb.torchrec.state.table_state import (
    Layout,
    TableShape,
    state_bounds,
    state_key,
)


class _EntryPart(NamedTuple):
    """Values of an entry on this rank, with their first row and column."""

    first_row: int
    first_column: int
    values: Tensor

    def columns(self, columns: range) -> Tensor | None:
        """Return some columns; None if the part lacks them."""
        begin, end = columns.start - self.first_column, columns.stop - self.first_column
        return self.values[:, begin:end] if begin >= 0 and end <= self.values.shape[1] else None


def _tiles(value: Tensor | ShardedTensor, ranks: RankGroup) -> list[_EntryPart]:
    """Return the parts of an entry that this rank contributes."""
    if isinstance(value, ShardedTensor):
        return [
            _EntryPart(
                shard.metadata.shard_offsets[0],
                shard.metadata.shard_offsets[1],
                shard.tensor.detach(),
            )
            for shard in value.local_shards()
        ]
    # a whole tensor is the same on all ranks: each contributes an equal part
    rows = rows_of(ranks.rank, ranks.size, value.shape[0])
    return [_EntryPart(rows.start, 0, value.detach()[rows.start : rows.stop])]


class StateDictRows:
    """Saved rows of a table on this rank, by saved column shard.

    Args:
        shape: of the table now.
        entries: as :func:`save_table` made them, with rows sharded in any way; or ``weight`` alone,
            rows of ids 0, 1, ...
        layout: saved with the entries; None: ``weight`` alone.

    Attributes:
        columns: of the saved column shards.
        state: saved optimizer state: all state of the table, or none.
    """

    def __init__(
        self,
        shape: TableShape,
        entries: Mapping[str, Any],
        layout: Layout | None,
        ranks: RankGroup,
    ) -> None:
        self._shape = shape
        self._layout = layout
        self._tiles = {
            name: _tiles(value, ranks) for name, value in entries.items() if name != "layout"
        }
        # check_entries ensures all or none
        self.state: list[StateTensor] = [
            tensor
            for tensor in shape.optimizer.state
            if layout is not None and state_key(tensor.name) in entries
        ]
        first = (0,) if layout is None else layout.first_columns
        ends = (*first[1:], shape.embedding_dim)
        self.columns = [range(*bounds) for bounds in zip(first, ends, strict=True)]

    def rows(self) -> list[list[RowBatch]]:
        """Return rows by saved column shard.

        Raises:
            ValueError: entries lack rows, or have values that training never leaves.
        """
        return [self._rows(k) for k in range(len(self.columns))]

    def counted(self) -> list[list[RowBatch]]:
        """Return ids without a row with the score ``count``, by saved column shard; may be empty.

        Raises:
            ValueError: as :meth:`rows`.
        """
        if not self._shape.counted or "count_id" not in self._tiles:
            return []
        result = []
        for k in range(len(self.columns)):
            of_shard = []
            for tile, counts in self._parts("count", range(k, k + 1)):
                ids = self._rows_of("count_id", tile, range(k, k + 1))[:, 0]
                of_shard.append(RowBatch.without_rows(ids, {"count": counts[:, 0]}))
            result.append(of_shard)
        return result

    def counts(self) -> tuple[int, int]:
        """Return how many ids ``bucket`` says, and ``weight_id`` has: on all ranks as many."""
        if not {"bucket", "weight_id"} <= self._tiles.keys():
            return 0, 0
        said = sum(int(tile.values.sum()) for tile in self._tiles["bucket"])
        tiles = self._tiles["weight_id"]
        return said, sum(tile.values.shape[0] for tile in tiles if tile.first_column == 0)

    def none(self, k: int) -> RowBatch:
        """Return zero rows, with the columns and dtypes of a saved column shard."""
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        state = {
            tensor.name: torch.empty(
                (0, len(self._state_columns(tensor, k))), dtype=tensor.dtype, device="cpu"
            )
            for tensor in self.state
        }
        rows = torch.empty((0, len(self.columns[k])), dtype=self._shape.dtype, device="cpu")
        return RowBatch(none, rows, state, dict.fromkeys(self._scores, none))

    @property
    def _scores(self) -> tuple[str, ...]:
        """Names of the saved scores."""
        there = self._layout is not None and "metadata" in self._tiles
        return self._layout.scores if self._layout is not None and there else ()

    def _state_columns(self, tensor: StateTensor, k: int) -> range:
        saved = [
            Place(number, columns.start, len(columns), 0, 0)
            for number, columns in enumerate(self.columns)
        ]
        begin, width = state_bounds(tensor, saved)[k]
        return range(begin, begin + width)

    def _parts(self, entry: str, columns: range) -> Iterator[tuple[_EntryPart, Tensor]]:
        """Yield the parts of an entry on this rank that have some columns, with these."""
        for tile in self._tiles[entry]:
            values = tile.columns(columns)
            if values is not None:
                self._check_values(entry, values)
                yield tile, values

    def _rows(self, k: int) -> list[RowBatch]:
        found, words = [], len(self._scores)
        for tile, weights in self._parts("weight", self.columns[k]):

            def values_of(entry: str, columns: range, like: _EntryPart = tile) -> Tensor:
                values = self._rows_of(entry, like, columns)
                self._check_values(entry, values)
                return values

            if self._layout is None:
                end = tile.first_row + weights.shape[0]
                ids = torch.arange(tile.first_row, end, device=weights.device)
            else:
                ids = self._rows_of("weight_id", tile, range(k, k + 1))[:, 0]
            state = {
                tensor.name: values_of(state_key(tensor.name), self._state_columns(tensor, k))
                for tensor in self.state
            }
            scores = {}
            if words > 0:
                of_ids = values_of("metadata", range(k * words, (k + 1) * words))
                scores = dict(zip(self._scores, of_ids.unbind(1), strict=True))
            found.append(RowBatch(ids, weights, state, scores))
        return found

    def _check_values(self, name: str, values: Tensor) -> None:
        """Raise ValueError for values that training never leaves and cannot continue from.

        Args:
            values: [n, columns] of an entry.
        """
        if name == "metadata" and self._layout is not None:
            for word, scores in zip(self._layout.scores, values.unbind(1), strict=True):
                check_score(f"{name} has", word, scores, self._layout.clock)
        elif name == "count" and values.numel() > 0:
            least, most = int(values.min()), int(values.max())
            bound = MAX_COUNT if self._shape.admission_half_life != 0 else (1 << 31) - 1
            if least < 1 or most > bound:
                wrong = least if least < 1 else most
                raise ValueError(f"{name} has {wrong}, expected counts from 1 to {bound}")
        elif name != "weight" and values.dtype == torch.int32:
            check_counts(name, values)

    def _rows_of(self, name: str, like: _EntryPart, columns: range) -> Tensor:
        """Return the values of another entry for the rows of a part."""
        for tile in self._tiles.get(name, []):
            same = (tile.first_row, tile.values.shape[0]) == (like.first_row, like.values.shape[0])
            found = tile.columns(columns) if same else None
            if found is not None:
                return found
        raise ValueError(
            f"{name} lacks rows {like.first_row} to {like.first_row + like.values.shape[0]} and "
            f"columns {columns.start} to {columns.stop}"
        )


__all__ = ["StateDictRows"]
