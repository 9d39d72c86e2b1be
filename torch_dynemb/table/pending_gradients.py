"""Gradients that wait for the optimizer's step, apart from where they wait."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.ops.columns import Meta, Pooling, RowClock
from torch_dynemb.ops.pending import PendingGradients, merge_grad_
from torch_dynemb.table.group import TableGroup


class WaitingGradients(NamedTuple):
    """Gradients of one table in split mode.

    Attributes:
        ids: int64 [n], distinct.
        handles: int64 [n], of their rows.
        gradients: float32 [n, dim], sums over the lookups since the last step.
    """

    ids: Tensor
    handles: Tensor
    gradients: Tensor


@torch.no_grad()
def read_waiting(group: TableGroup, table: int) -> WaitingGradients:
    """A copy of the gradients that wait for a table; on a GPU it waits for their number."""
    pending = PendingGradients.of(group.pending)
    merge_grad_(pending, group.row_clock)
    slab = int(group.meta[table, Meta.SLAB])
    count = int(pending.counts[slab, 0])
    of_table = pending.tables[slab][:count] == table
    return WaitingGradients(
        pending.ids[slab][:count][of_table],
        pending.handles[slab][:count][of_table],
        pending.gradients[slab][:count][of_table],
    )


@torch.no_grad()
def add_waiting(group: TableGroup, table: int, added: WaitingGradients) -> None:
    """Adds gradients to those that wait; negative handles, which have no row, are left out."""
    if added.ids.shape[0] == 0:
        return
    updates = group.row_clock[len(group.tables_config) + RowClock.UPDATES].reshape(1).clone()
    torch.ops.dynemb.accumulate_grad_(
        *PendingGradients.of(group.pending),
        group.row_clock,
        group.weights,
        group.generations,
        group.row_meta,
        group.init_data,
        added.gradients.contiguous(),
        added.ids,
        added.handles,
        torch.tensor([0, added.ids.shape[0]], device=added.ids.device),
        None,
        updates,
        [table],
        [group.tables_config[table].embedding_dim],
        int(Pooling.NONE),
    )


__all__ = ["WaitingGradients", "add_waiting", "read_waiting"]
