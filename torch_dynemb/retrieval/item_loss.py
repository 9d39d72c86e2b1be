"""Base of losses of queries against the rows of a table."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from torch_dynemb.nn.inputs import flat_ids
from torch_dynemb.retrieval.items import (
    Items,
    checked_positives,
    checked_query,
    checked_temperature,
    checked_weights,
    items_of,
    weighted_mean,
)


class Losses(NamedTuple):
    """Losses of the queries of a batch.

    Attributes:
        values: float32 [n].
        counted: bool [n], queries that have a loss; None: all.
    """

    values: Tensor
    counted: Tensor | None


class ItemLoss(nn.Module):
    """Base of losses of queries against the rows of a table.

    The module has no parameters, and is not the owner of ``items``.

    Args:
        items: module with the table.
        table: its name; None: the module has one.
        temperature: divisor of the scores.
    """

    def __init__(self, items: nn.Module, table: int | str | None, temperature: float) -> None:
        super().__init__()
        owner = type(self).__name__
        of = items_of(owner, items, table)
        # in a tuple: the model registers the module
        self._items = (of.module,)
        self._table = of.table
        self.temperature = checked_temperature(owner, temperature)

    @property
    def items(self) -> nn.Module:
        """The module with the table."""
        return self._items[0]

    def _now(self) -> Items:
        """Return the table as it is now."""
        return Items(self._items[0], self._table)

    def forward(self, query: Tensor, positive_ids: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss of the queries.

        Args:
            query: float [n, dim], n at least 1.
            positive_ids: int64 or int32 [n]. A padding id has no loss.
            weights: float [n], factors of the losses, which are divided by their sum; default: 1.

        Returns:
            float32 [].

        Raises:
            TypeError: dtype of an argument.
            ValueError: shape or device of an argument, or NaN in ``query`` (not looked for in
                compiled code and on a GPU).
            RuntimeError: the table is empty, in eval mode or because it admits ids late. Or
                compiled code would have to do what it cannot.
            NoRoomError: as lookups of ``items``.
        """
        owner = type(self).__name__
        items = self._now()
        query = checked_query(owner, query, items.dim, items.tables.device)
        ids = flat_ids(f"{owner}: positive_ids", positive_ids)
        checked_positives(owner, positive_ids, query)
        weights = checked_weights(owner, weights, query)
        losses = self._losses(items, query, ids)
        return weighted_mean(losses.values, weights, losses.counted)

    def _losses(self, items: Items, query: Tensor, positive_ids: Tensor) -> Losses:
        """Return the losses of queries [n, dim] with positives int64 [n]."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        name = self._items[0].group.names[self._table]
        return f"table={name!r}, temperature={self.temperature}"


__all__ = ["ItemLoss", "Losses"]
