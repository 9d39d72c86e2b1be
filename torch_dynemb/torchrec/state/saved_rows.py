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
from torch_dynemb.table.score_check import check_score
from torch_dynemb.table.state_check import check_counts
from torch_dynemb.torchrec.state.shard_places import Place
from torch_dynemb.torchrec.state.table_state import (
    Layout,
    TableShape,
    state_bounds,
    state_key,
)


class Columns(NamedTuple):
    """Columns [begin, end) of rows."""

    begin: int
    end: int


class Rows(NamedTuple):
    """Ids and their values in each entry.

    Attributes:
        ids: int64 [n].
        values: by entry: [n, columns].
    """

    ids: Tensor
    values: dict[str, Tensor]

    def blocks(self, size: int) -> Iterator[Rows]:
        """Yield views of at most ``size`` rows each."""
        for begin in range(0, self.ids.shape[0], size):
            end = begin + size
            values = {name: value[begin:end] for name, value in self.values.items()}
            yield Rows(self.ids[begin:end], values)


class _EntryPart(NamedTuple):
    """Values of an entry on this rank, with their first row and column."""

    first_row: int
    first_column: int
    values: Tensor

    def columns(self, columns: Columns) -> Tensor | None:
        """Return some columns; None if the part lacks them."""
        begin, end = columns.begin - self.first_column, columns.end - self.first_column
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
        self.columns = [Columns(*bounds) for bounds in zip(first, ends, strict=True)]

    def rows(self) -> list[list[Rows]]:
        """Return rows by saved column shard.

        Raises:
            ValueError: entries lack rows, or have values that training never leaves.
        """
        return [self._rows("weight_id", k, self._entries(k)) for k in range(len(self.columns))]

    def counted(self) -> list[list[Rows]]:
        """Return ids without a row and their entry ``count``, by saved column shard; may be empty.

        Raises:
            ValueError: as :meth:`rows`.
        """
        if not self._shape.counted or "count_id" not in self._tiles:
            return []
        return [
            self._rows("count_id", k, {"count": Columns(k, k + 1)})
            for k in range(len(self.columns))
        ]

    def none(self, k: int) -> Rows:
        """Return zero rows, with the columns and dtypes of a saved column shard."""
        dtypes = {"weight": self._shape.dtype, "metadata": torch.int64}
        dtypes |= {state_key(tensor.name): tensor.dtype for tensor in self.state}
        values = {
            name: torch.empty((0, columns.end - columns.begin), dtype=dtypes[name], device="cpu")
            for name, columns in self._entries(k).items()
        }
        return Rows(torch.empty(0, dtype=torch.int64, device="cpu"), values)

    def _entries(self, k: int) -> dict[str, Columns]:
        """Return the entries of a saved column shard, with its columns in them."""
        entries = {"weight": self.columns[k]}
        if self._layout is None:
            return entries
        for tensor in self.state:
            entries[state_key(tensor.name)] = self._state_columns(tensor, k)
        words = len(self._layout.scores)
        if words > 0 and "metadata" in self._tiles:
            entries["metadata"] = Columns(k * words, (k + 1) * words)
        return entries

    def _state_columns(self, tensor: StateTensor, k: int) -> Columns:
        saved = [
            Place(number, columns.begin, columns.end - columns.begin, 0, 0)
            for number, columns in enumerate(self.columns)
        ]
        begin, width = state_bounds(tensor, saved)[k]
        return Columns(begin, begin + width)

    def _rows(self, id_entry: str, k: int, entries: Mapping[str, Columns]) -> list[Rows]:
        found = []
        named = next(iter(entries))
        for tile in self._tiles[named]:
            if tile.columns(entries[named]) is None:
                continue
            count = tile.values.shape[0]
            if self._layout is None:
                ids = torch.arange(
                    tile.first_row, tile.first_row + count, device=tile.values.device
                )
            else:
                ids = self._rows_of(id_entry, tile, Columns(k, k + 1))[:, 0]
            values = {}
            for name, columns in entries.items():
                values[name] = self._rows_of(name, tile, columns)
                self._check_values(name, values[name])
            found.append(Rows(ids, values))
        return found

    def _check_values(self, name: str, values: Tensor) -> None:
        """Raise ValueError for values that training never leaves and cannot continue from.

        Args:
            values: [n, columns] of an entry.
        """
        if name == "metadata" and self._layout is not None:
            for word, scores in zip(self._layout.scores, values.unbind(1), strict=True):
                check_score(name, word, scores, self._layout.clock)
        elif name == "count" and values.numel() > 0:
            least, most = int(values.min()), int(values.max())
            bound = MAX_COUNT if self._shape.admission_half_life != 0 else (1 << 31) - 1
            if least < 1 or most > bound:
                wrong = least if least < 1 else most
                raise ValueError(f"{name} has {wrong}, expected counts from 1 to {bound}")
        elif name != "weight" and values.dtype == torch.int32:
            check_counts(name, values)

    def _rows_of(self, name: str, like: _EntryPart, columns: Columns) -> Tensor:
        """Return the values of another entry for the rows of a part."""
        for tile in self._tiles.get(name, []):
            same = (tile.first_row, tile.values.shape[0]) == (like.first_row, like.values.shape[0])
            found = tile.columns(columns) if same else None
            if found is not None:
                return found
        raise ValueError(
            f"{name} lacks rows {like.first_row} to {like.first_row + like.values.shape[0]} and "
            f"columns {columns.begin} to {columns.end}"
        )


__all__ = ["Columns", "Rows", "StateDictRows"]
