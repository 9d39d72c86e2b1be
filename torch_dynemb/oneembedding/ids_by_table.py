"""Grouping of an embedding's ids by table, the order that lookups need."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described
from torch_dynemb.oneembedding.keys import ids_of
from torch_dynemb.ops import LookupBatch


class IdsByTable(NamedTuple):
    """Ids grouped by table.

    Attributes:
        ids: int64 [n].
        offsets: int64 [tables + 1], the begin of each table in ``ids``.
        places: int64 [n], the position in ``ids`` of each id of the input. None: the order is that
            of
            the input or, with several tables, that of the transposed input.
    """

    ids: Tensor
    offsets: Tensor
    places: Tensor | None

    def batch(self, dim: int) -> LookupBatch:
        """Make a lookup batch with one row for each id.

        Args:
            dim: columns of a row, the same in all tables.
        """
        tables = list(range(self.offsets.shape[0] - 1))
        return LookupBatch.of_rows(self.ids, self.offsets, tables, dim)

    def in_order(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Return rows of ``ids`` in the order of the input.

        Args:
            rows: [n, columns].
            shape: of the input ids.

        Returns:
            [*shape, columns].
        """
        columns = rows.shape[1]
        if self.places is not None:
            rows = rows.index_select(0, self.places)
        elif self.offsets.shape[0] > 2:
            rows = rows.view(self.offsets.shape[0] - 1, -1, columns).transpose(0, 1)
        return rows.reshape(*shape, columns)


def ids_by_table(owner: str, ids: Tensor, table_ids: Tensor | None, tables: int) -> IdsByTable:
    """Group ids by table.

    Args:
        owner: prefix of error messages.
        ids: int64 of any shape; without ``table_ids`` the last dimension has one id for each table.
        table_ids: int64 of the same shape, the table number of each id; None: see ``ids``.
        tables: number of tables.

    Raises:
        ValueError: shapes do not match, or the table does not exist.
    """
    if table_ids is None:
        if tables > 1 and (ids.dim() == 0 or ids.shape[-1] != tables):
            raise ValueError(
                f"{owner}: ids has shape {tuple(ids.shape)}, expected (batch, {tables}), an id of "
                "each table, or table_ids of the same shape"
            )
        flat = ids.reshape(-1)
        if tables > 1:
            flat = ids.reshape(-1, tables).t().reshape(-1)
        bounds = torch.arange(tables + 1, device=ids.device) * (flat.shape[0] // tables)
        return IdsByTable(flat, bounds, None)
    if table_ids.shape != ids.shape:
        raise ValueError(
            f"{owner}: table_ids has shape {tuple(table_ids.shape)}, expected that of ids, "
            f"{tuple(ids.shape)}"
        )
    of_ids = table_ids.reshape(-1).contiguous()
    _check_tables(owner, of_ids, tables)
    order = torch.argsort(of_ids, stable=True)
    numbers = torch.arange(tables + 1, device=ids.device)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=ids.device)
    return IdsByTable(ids.reshape(-1)[order], torch.searchsorted(of_ids[order], numbers), places)


def keys_by_table(
    owner: str, ids: Tensor, table_ids: Tensor | None, key_type: torch.dtype, tables: int
) -> IdsByTable:
    """Check and group the ids that an embedding's forward was given; see :func:`ids_by_table`.

    Args:
        owner: prefix of error messages.
        ids: of ``key_type``.
        table_ids: integers of the same shape, or None.
        key_type: dtype that ids must have.
        tables: number of tables.

    Raises:
        TypeError: ids have another dtype, or ``table_ids`` are not integers.
        ValueError: shapes do not match, or the table does not exist.
    """
    keys = ids_of(f"{owner}: ids", ids, key_type)
    if table_ids is not None:
        if not isinstance(table_ids, Tensor) or table_ids.is_floating_point():
            raise TypeError(
                f"{owner}: table_ids is {described(table_ids)}, expected an integer tensor"
            )
        table_ids = table_ids.to(torch.int64)
    return ids_by_table(owner, keys, table_ids, tables)


def _check_tables(owner: str, table_ids: Tensor, tables: int) -> None:
    inside = (table_ids >= 0) & (table_ids < tables)
    if torch.compiler.is_compiling() or table_ids.is_cuda:  # reading values would block
        torch._assert_async(
            inside.all(), f"{owner}: table_ids has values outside 0 to {tables - 1}"
        )
    elif not bool(inside.all()):
        raise ValueError(
            f"{owner}: table_ids has {int(table_ids[~inside][0])}, expected 0 to {tables - 1}"
        )


__all__ = ["IdsByTable", "ids_by_table", "keys_by_table"]
