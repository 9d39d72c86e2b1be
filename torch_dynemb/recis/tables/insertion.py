"""Checks of rows that users insert."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import float_rows
from torch_dynemb.nn.inputs import flat_ids
from torch_dynemb.recis.tables.packed_rows import pack_rows
from torch_dynemb.table import RowBatch, TableGroup


def rows_to_store(
    owner: str, name: str, ids: Tensor, rows: Tensor, group: TableGroup, dim: int, *, packed: bool
) -> RowBatch:
    """Check rows of ids, and return them as a hash table stores them.

    Args:
        owner: function, with which errors begin.
        name: argument of the rows.
        ids: int64 or int32 of any shape, n in all.
        rows: float [n, dim].
        group: of the hash table.
        dim: columns of a row.
        packed: whether the table stores int8 rows.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices do not match, or an id is repeated.
    """
    flat = flat_ids(f"{owner}: ids", ids)
    given = float_rows(f"{owner}: {name}", rows, group.device).detach()
    if tuple(given.shape) != (flat.numel(), dim):
        raise ValueError(
            f"{owner}: {name} has shape {tuple(given.shape)}, expected ({flat.numel()}, {dim})"
        )
    bounds = torch.arange(2, device=flat.device) * flat.shape[0]
    repeated = flat.shape[0] - ops.unique_ids(flat, bounds).ids.shape[0]
    if repeated > 0:
        raise ValueError(f"{owner}: ids has {repeated} repeated ids, expected every id once")
    return RowBatch(flat, pack_rows(given) if packed else given.to(group.config.tables[0].dtype))


__all__ = ["rows_to_store"]
