"""The table of items that losses and searches work on."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_dynemb.argument_checks import described, number, table_number, tensor
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.ops.columns import Table
from torch_dynemb.table.tables import Tables


class Items(NamedTuple):
    """One table of a module.

    Attributes:
        module: that has the table.
        table: its number.
    """

    module: TableModule
    table: int

    @property
    def tables(self) -> Tables:
        """The tables of the module now."""
        return self.module.group.tables

    @property
    def dim(self) -> int:
        """Columns of a row."""
        return self.tables.config.tables[self.table].embedding_dim

    @property
    def shared(self) -> bool:
        """Whether other ranks have some of the rows."""
        return self.module._shared_rows is not None


def items_of(owner: str, items: nn.Module, table: int | str | None) -> Items:
    """Return the table of a module.

    Args:
        owner: what errors begin with.
        items: the module.
        table: name or number of the table; None: the module has one.

    Raises:
        TypeError: ``items`` has no dynamic table of this process.
        ValueError, IndexError: it has several tables and ``table`` is None, or lacks it.
    """
    if not isinstance(items, TableModule):
        raise TypeError(
            f"{owner}: items is {described(items)}, expected a module with a dynamic table, such "
            "as DynamicEmbedding; rows of other modules, such as TorchRec's, go to "
            "in_batch_softmax_loss"
        )
    found = Items(items, number_of(owner, items.group.names, table))
    check_unpacked(owner, items, found.dim)
    return found


def check_unpacked(owner: str, items: nn.Module, columns: int) -> None:
    """Raise ValueError if rows have other columns than lookups return, as packed ones do."""
    returned = getattr(items, "embedding_dim", columns)
    if returned != columns:
        raise ValueError(
            f"{owner}: items has rows of {columns} columns, in which vectors of {returned} are "
            "packed: take a table of float rows"
        )


def number_of(owner: str, names: list[str], table: int | str | None) -> int:
    """Return the number of a table.

    Raises:
        TypeError, ValueError, IndexError: as :func:`torch_dynemb.argument_checks.table_number`, or
            ``table`` is None and there are several.
    """
    if table is None and len(names) > 1:
        raise ValueError(f"{owner}: table is None, but items has tables {names}: name one")
    return 0 if table is None else table_number(owner, names, table)


def checked_query(owner: str, query: object, dim: int, device: torch.device) -> Tensor:
    """Return a query, float [n, dim].

    Raises:
        TypeError: it is not a tensor of floats.
        ValueError: its shape or device differs, or it has NaN. Compiled code and a GPU do not look
            for NaN.
    """
    given = tensor(f"{owner}: query", query)
    if not given.is_floating_point():
        raise TypeError(f"{owner}: query has dtype {given.dtype}, expected floats")
    if given.dim() != 2 or given.shape[1] != dim:
        raise ValueError(
            f"{owner}: query has shape {tuple(given.shape)}, expected (n, {dim}), the dim of items"
        )
    if isinstance(given.shape[0], int) and given.shape[0] == 0:
        raise ValueError(f"{owner}: query has no rows, expected one query or more")
    if given.device != device:
        raise ValueError(f"{owner}: query is on {given.device}, but items on {device}")
    if not torch.compiler.is_compiling() and given.is_cpu and bool(given.detach().isnan().any()):
        row = int(given.detach().isnan().any(1).nonzero()[0])
        raise ValueError(
            f"{owner}: query has NaN, first in row {row}: check the loss and the learning rate of "
            "the steps before; nothing has been looked up"
        )
    return given


def check_not_empty(owner: str, items: Items) -> None:
    """Raise RuntimeError if a table has no id; not looked at in compiled code and on a GPU."""
    size = items.tables.index.tables[items.table, Table.SIZE]
    if not torch.compiler.is_compiling() and size.is_cpu and int(size) == 0:
        raise RuntimeError(
            f"{owner}: table {items.tables.config.names[items.table]!r} is empty, but queries are "
            "compared with its ids: train it first; if it admits ids late, look ids up by items "
            "until some have a row"
        )


def checked_temperature(owner: str, temperature: object) -> float:
    """Return a temperature.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not positive and finite.
    """
    given = number(f"{owner}: temperature", temperature)
    if not 0 < given < math.inf:
        raise ValueError(f"{owner}: temperature is {given}, expected more than 0")
    return given


def checked_weights(owner: str, weights: object, query: Tensor) -> Tensor | None:
    """Return weights of the queries, float [n], or None.

    Raises:
        TypeError: they are not a tensor of floats.
        ValueError: their shape or device is not that of the queries.
    """
    if weights is None:
        return None
    given = tensor(f"{owner}: weights", weights)
    if not given.is_floating_point():
        raise TypeError(f"{owner}: weights has dtype {given.dtype}, expected floats")
    if given.shape != query.shape[:1] or given.device != query.device:
        raise ValueError(
            f"{owner}: weights has shape {tuple(given.shape)} on {given.device}, expected "
            f"({query.shape[0]},) on {query.device}, one for each query"
        )
    return given


def checked_positives(owner: str, ids: Tensor, query: Tensor) -> None:
    """Raise ValueError unless there is one positive id for each query, on its device."""
    if ids.shape != query.shape[:1] or ids.device != query.device:
        raise ValueError(
            f"{owner}: positive_ids has shape {tuple(ids.shape)} on {ids.device}, expected "
            f"({query.shape[0]},) on {query.device}, one for each query"
        )


def weighted_mean(losses: Tensor, weights: Tensor | None, counted: Tensor | None) -> Tensor:
    """Return the mean of losses.

    Args:
        losses: float32 [n].
        weights: float [n], or None: all are 1.
        counted: bool [n], losses that count, or None: all do.

    Returns:
        float32 []; 0 if the weights add up to 0.
    """
    if weights is None and counted is None:
        return losses.mean()
    factors = losses.new_ones(losses.shape) if weights is None else weights.to(losses.dtype)
    if counted is not None:
        factors = factors * counted
    total = factors.sum()
    mean: Tensor = (losses * factors).sum() / torch.where(total > 0, total, 1.0)
    return mean


__all__ = [
    "Items",
    "check_not_empty",
    "check_unpacked",
    "checked_positives",
    "checked_query",
    "checked_temperature",
    "checked_weights",
    "items_of",
    "number_of",
    "weighted_mean",
]
