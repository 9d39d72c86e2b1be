"""Changes after a checkpoint that a load takes together with it: the commits of a delta log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb.optim.base import StateTensor
from torch_dynemb.parts.saved_tables import SavedTable
from torch_dynemb.rows.column_shards import by_row
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.shards import IdSlots

Shards = Sequence[range]  # columns of each column shard, ascending


class LaterTable(NamedTuple):
    """Content of a table that replaces saved content, of the ids that a rank owns.

    Attributes:
        saved: description of the table after the changes, without files.
        touched: int64 [m], ascending: changed and removed ids. Saved rows of these are skipped.
        changed: the changed ids. State with one value per row is [n, shards].
        counted: all ids that wait for admission; None if the table counts none.
        sketches: counting sketches by the ids of their part, int32 [rows, width].
    """

    saved: SavedTable
    touched: Tensor
    changed: RowBatch
    counted: CountedIds | None
    sketches: dict[IdSlots, Tensor]

    @property
    def optimizer_steps(self) -> int:
        """Number of updates of its optimizer."""
        return max(part.optimizer_steps for part in self.saved.parts)

    def with_files_of(self, base: SavedTable) -> SavedTable:
        """Return its description with the files of the checkpoint before the changes.

        Args:
            base: entry in the manifest of that checkpoint.
        """
        return replace(self.saved, parts=base.parts)

    def state_of(self, tensor: StateTensor, columns: range, places: Tensor | slice) -> Tensor:
        """Return the optimizer state of some columns.

        Args:
            tensor: the state tensor.
            columns: columns of the table. Of 8-bit state those of a saved shard.
            places: rows, int64 [n] or a slice.

        Returns:
            [n, columns], or [n, 1] for one value per row.
        """
        values, shards = self.changed.state[tensor.name][places], shards_of(self.saved)
        if tensor.per_row:
            return by_row(values, shards, columns)
        if tensor.dtype != torch.uint8:
            return values[:, columns.start : columns.stop]
        widths = [tensor.columns(len(of)) for of in shards]
        begin = sum(widths[: shards.index(columns)])
        return values[:, begin : begin + tensor.columns(len(columns))]


class LaterChanges(NamedTuple):
    """All changes of a model after a checkpoint.

    Attributes:
        sequence: number of the last commit; 0: there are none.
        tables: by name, those that this rank has a part of.
        dense: changed tensors of the dense state, by name.
        state: what the program gave as ``state=`` with the last change.
    """

    sequence: int
    tables: dict[str, LaterTable]
    dense: dict[str, Tensor]
    state: Any


def shards_of(saved: SavedTable) -> list[range]:
    """Return the columns of each column shard of a table, ascending.

    Args:
        saved: description of the table.
    """
    firsts = sorted({(part.first_column, part.columns) for part in saved.parts})
    return [range(first, first + count) for first, count in firsts]


__all__ = ["LaterChanges", "LaterTable", "shards_of"]
