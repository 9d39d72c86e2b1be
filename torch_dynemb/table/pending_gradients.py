"""The pending gradients of one table, apart from where they lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.ops.columns import Meta, Pooling, RowClock
from torch_dynemb.ops.pending import PendingGradients, accumulate_grad_, merge_grad_
from torch_dynemb.table.tables import Tables


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
    """A copy of the pending gradients of a table; waits for a GPU to count them."""
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
def add_pending(tables: Tables, table: int, added: TableGradients) -> None:
    """Adds gradients to the pending ones; negative handles, which have no row, are left out."""
    if added.ids.shape[0] == 0:
        return
    updates = tables.rows.row_clock[len(tables.config.tables) + RowClock.UPDATES].reshape(1).clone()
    accumulate_grad_(
        PendingGradients.of(tables.rows.pending),
        tables.rows,
        added.gradients.contiguous(),
        added.ids,
        added.handles,
        torch.tensor([0, added.ids.shape[0]], device=added.ids.device),
        None,
        updates,
        feature_tables=[table],
        feature_dims=[tables.config.tables[table].embedding_dim],
        pooling=int(Pooling.NONE),
    )


__all__ = ["TableGradients", "add_pending", "read_pending"]
