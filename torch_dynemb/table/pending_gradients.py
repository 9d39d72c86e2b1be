"""The pending gradients of one table, independent of the places of its rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.ops.columns import GENERATION_BITS, Meta, RowClock
from torch_dynemb.ops.pending import PendingGradients, accumulate_grad_, merge_grad_
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.table.tables import Tables

# From this number on, gradients of a lookup are sorted by table; csrc/cpu/gradient/runs.cpp.
_MANY = 1 << 16
_ROW_BITS = 36


class TableGradients(NamedTuple):
    """The pending gradients of one table, in split mode.

    Attributes:
        ids: int64 [n], distinct.
        handles: int64 [n], of their rows.
        gradients: float32 [n, dim], sums over the lookups since the last step.
    """

    ids: Tensor
    handles: Tensor
    gradients: Tensor


@torch.no_grad()
def read_pending(tables: Tables, table: int) -> TableGradients:
    """Copy the pending gradients of a table; waits for a GPU to count them."""
    pending = PendingGradients.of(tables.rows.pending)
    merge_grad_(pending, tables.rows)
    slab = int(tables.index.meta[table, Meta.SLAB])
    count = int(pending.counts[slab, 0])
    of_table = pending.tables[slab][:count] == table
    return TableGradients(
        pending.ids[slab][:count][of_table],
        pending.handles[slab][:count][of_table],
        pending.gradients[slab][:count][of_table],
    )


@torch.no_grad()
def sort_pending(tables: Tables, slab: int) -> None:
    """Sort the pending gradients of a tiered slab by row instead of by slot.

    A sum over them, such as a norm, then has the same bits as for a table in memory.

    Args:
        tables: of the group; their gradients have been merged.
        slab: its number.
    """
    tiers = tables.tiers
    if tiers is None or not tiers.holds(slab):
        return
    pending = PendingGradients.of(tables.rows.pending)
    count = int(pending.counts[slab, 0])
    of_slab = (part[slab] for part in (pending.handles, pending.ids, pending.tables))
    entries = [entry[:count] for entry in (*of_slab, pending.gradients[slab])]
    slots, tables_of = entries[0] >> GENERATION_BITS, entries[2]
    # Many gradients are grouped by table, few are in one order. Gradients in neither order were
    # sorted here before.
    table_begins = tables_of[1:] != tables_of[:-1]
    in_one_order = _ascends(slots)
    if in_one_order and len(slots) >= _MANY:
        in_one_order = int(table_begins.sum()) + 1 > len(tables_of.unique())
    parts = torch.zeros_like(tables_of)
    if not in_one_order:
        parts[1:] = table_begins.cumsum(0)
    rows = tiers.rows_of(slab, slots)
    order = torch.argsort((parts << _ROW_BITS) + rows)
    if _ascends(order):
        return
    for entry in entries:
        entry.copy_(entry[order])


@torch.no_grad()
def drop_pending(tables: Tables, table: int, ids: Tensor) -> None:
    """Drop and count the pending gradients of ids that a table no longer has.

    Their rows are free, so an update would change nothing, but a norm would contain them. The
    caller defers signals.

    Args:
        tables: of the group.
        table: its number.
        ids: int64 of any shape.
    """
    if not tables.rows.pending:
        return
    pending = PendingGradients.of(tables.rows.pending)
    slab = int(tables.index.meta[table, Meta.SLAB])
    count = int(pending.counts[slab, 0])
    if count == 0:
        return
    entries = [part[slab][:count] for part in pending[:4]]
    kept = (entries[2] != table) | ~torch.isin(entries[1], ids)
    left = int(kept.sum())
    if left == count:
        return
    for entry in entries:
        entry[:left] = entry[kept]
    pending.counts[slab, 0] = left
    tables.rows.row_clock[len(tables.config.tables) + RowClock.STALE] += count - left


def _ascends(values: Tensor) -> bool:
    return bool((values[1:] > values[:-1]).all())


@torch.no_grad()
def add_pending(tables: Tables, table: int, added: TableGradients) -> None:
    """Add gradients to the pending ones; negative handles (ids without a row) are skipped."""
    if added.ids.shape[0] == 0:
        return
    updates = tables.rows.row_clock[len(tables.config.tables) + RowClock.UPDATES].reshape(1).clone()
    accumulate_grad_(
        PendingGradients.of(tables.rows.pending),
        tables.rows,
        added.gradients.contiguous(),
        LookupBatch.of_rows(
            added.ids,
            torch.tensor([0, added.ids.shape[0]], device=added.ids.device),
            [table],
            tables.config.tables[table].embedding_dim,
        ),
        added.handles,
        updates,
    )


__all__ = ["TableGradients", "add_pending", "drop_pending", "read_pending", "sort_pending"]
