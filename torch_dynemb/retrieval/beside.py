"""Lookups of a batch and, beside it, of ids that are only found."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.table import lookup


class LookedUp(NamedTuple):
    """Result of :func:`look_up_beside`.

    Attributes:
        rows: ``output_dtype`` [N + m, dim]: of the batch, then of the other ids.
        ids: int64 [N + m].
        handles: int64 [N + m].
    """

    rows: Tensor
    ids: Tensor
    handles: Tensor


def look_up_beside(module: TableModule, batch: LookupBatch, draw: Callable[[], Tensor]) -> LookedUp:
    """Look ids up as a module's forward does, and beside them ids that are only found.

    In training these get no row and no score, but their rows get gradients, in one update with
    those of the batch.

    Args:
        module: has the table.
        batch: asks for a row for each id of one table in memory, of this process alone.
        draw: called after the ids of the batch have been inserted; returns the other ids, int64
            [m].
    """
    tables = module.group.tables
    handles, anchor = module._handles_of(batch)
    others = draw()
    found = lookup.find(tables, others, *batch.index_arguments[1:]).handles
    whole = batch._replace(ids=torch.cat([batch.ids, others]))
    handles = torch.cat([handles, found])
    if anchor is None:
        rows = ops.embedding_inference(tables.rows, whole, handles)
    else:
        code = tables.config.optimizer_code
        rows = ops.embedding(tables.rows, whole, handles, anchor, optimizer=code)
    return LookedUp(rows.to(module.output_dtype), whole.ids, handles)


__all__ = ["LookedUp", "look_up_beside"]
