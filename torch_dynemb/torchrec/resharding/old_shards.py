"""Shards of a table before a move: facts that all ranks exchange, and rows in a saved order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import SKETCH_ROWS, Clock, Meta, PolicyColumn
from torch_dynemb.optim import FusedOptimizer
from torch_dynemb.table.clock import next_now
from torch_dynemb.table.content import (
    optimizer_steps,
    read_entries,
    score_names,
)
from torch_dynemb.table.row_access import read_rows
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.shards import TableShard
from torch_dynemb.table.tables import Tables

_PART_BITS = 44  # of a number among the rows of a part; the number of the part is above


class OldShard(NamedTuple):
    """Facts of a shard.

    Attributes:
        shard: its ids and columns.
        rank: the rank that has it.
        ids, ids_crc32c: number of its ids, and their checksum in ascending order.
        seed: of initial rows.
        step, now: clock of its group: training steps, and seconds of the next lookups.
        optimizer_steps: updates of its optimizer.
        counters: of its table in the index, see :class:`torch_dynemb.ops.columns.Table`.
        hyper: hyper-parameters of its optimizer.
        counted: whether single ids are counted until they are admitted.
        sketch_width: cells per row of its admission sketch; 0: it has none.
        records_changes: whether a checkpoint of increments reads its changes.
    """

    shard: TableShard
    rank: int
    ids: int
    ids_crc32c: int
    seed: int
    step: int
    now: int
    optimizer_steps: int
    counters: list[int]
    hyper: dict[str, Any]
    counted: bool
    sketch_width: int
    records_changes: bool

    @property
    def columns(self) -> range:
        """Columns of the shard."""
        return self.shard.columns


class OldRows:
    """Rows of a shard on this rank, in the order in which a checkpoint saves them.

    A loaded table has its ids in that order, and later evictions depend on it. The order is that of
    rows in memory. Shards of columns have the ids in ascending order, which is the same on all
    ranks.

    Args:
        tables: of the group.
        table: its number.
        shard: its ids and columns.
    """

    def __init__(self, tables: Tables, table: int, shard: TableShard) -> None:
        self._tables, self._table = tables, table
        entries = read_entries(tables, table)
        entries = entries.ordered(torch.argsort(entries.ids if shard.split else entries.handles))
        self._ids, self._handles = entries.ids, entries.handles
        layout = tables.config.layout
        self._scores = {
            name: entries.words[:, layout.word(name)] for name in score_names(tables, table)
        }

    @property
    def ids(self) -> Tensor:
        """int64 [n]."""
        return self._ids

    def checksum(self) -> int:
        """Return the checksum of the ids in ascending order."""
        return ops.crc32c(self._ids.sort().values.cpu())

    def blocks(self, size: int) -> Iterator[RowBatch]:
        """Yield rows with their optimizer state, at most ``size`` at a time."""
        for begin in range(0, self._ids.shape[0], size):
            some = slice(begin, begin + size)
            yield read_rows(self._tables, self._table, self._ids[some], self._handles[some])

    def ids_in_order(self, part: int) -> RowBatch:
        """Return the ids with their places as ``order``, and their scores.

        Args:
            part: number of the shard among those with the same columns.
        """
        order = {"order": _places(self._ids, part)}
        return RowBatch.without_rows(self._ids, order | self._scores)


def counts_in_order(tables: Tables, table: int, part: int) -> RowBatch:
    """Return ids that wait for admission, with their places as ``order``, and ``count``.

    Args:
        tables: of the group.
        table: its number.
        part: number of the shard among those with the same columns.
    """
    counters = tables.config.layout.counters[table]
    assert counters is not None
    entries = read_entries(tables, counters)
    counts = entries.handles + 1  # stored like handles, where 0 means an empty slot
    order = _places(entries.ids, part)
    return RowBatch.without_rows(entries.ids, {"order": order, "count": counts})


def _places(ids: Tensor, part: int) -> Tensor:
    return torch.arange(ids.shape[0], device=ids.device) | part << _PART_BITS


def part_of_place(places: Tensor) -> Tensor:
    """Return the number of the part of each place, int64 [n]."""
    return places >> _PART_BITS


def facts_of(
    tables: Tables,
    table: int,
    shard: TableShard,
    rank: int,
    rows: OldRows,
    optimizer: FusedOptimizer,
    *,
    records_changes: bool,
) -> OldShard:
    """Return what other ranks must know of a shard.

    Args:
        tables: of the group.
        table: its number.
        shard: its ids and columns.
        rank: of this process.
        rows: of the shard.
        optimizer: of the group.
        records_changes: see :class:`OldShard`.
    """
    index = tables.index
    group = optimizer.param_groups[table]
    assert tables.config.optimizer is not None
    of_policy = tables.config.layout.rows[table] if tables.config.layout.rows else {}
    return OldShard(
        shard,
        rank,
        rows.ids.numel(),
        rows.checksum() if shard.split else 0,
        int(index.meta[table, Meta.SEED]),
        int(index.clock[Clock.STEP]),
        next_now(tables),
        optimizer_steps(tables, table),
        index.tables[table].tolist(),
        {
            name: float(group[name]) if isinstance(group[name], Tensor) else group[name]
            for name in tables.config.optimizer.hyper_columns
        },
        tables.config.layout.counters[table] is not None,
        of_policy.get(PolicyColumn.SKETCH_WIDTH, 0),
        records_changes,
    )


def sketch_of(tables: Tables, table: int) -> Tensor:
    """Return the cells of a table's admission sketch, int32 [SKETCH_ROWS, width], a view."""
    of_policy = tables.config.layout.rows[table]
    begin, width = of_policy[PolicyColumn.SKETCH_BEGIN], of_policy[PolicyColumn.SKETCH_WIDTH]
    return tables.index.sketch[begin : begin + SKETCH_ROWS * width].view(SKETCH_ROWS, width)


__all__ = [
    "OldRows",
    "OldShard",
    "counts_in_order",
    "facts_of",
    "part_of_place",
    "sketch_of",
]
