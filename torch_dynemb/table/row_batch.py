"""Ids with their rows: the one form in which rows travel between tables, files, logs and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_NONE: Mapping[str, Tensor] = {}


class RowBatch(NamedTuple):
    """Some ids of a table with their rows, optimizer state and scores.

    Attributes:
        ids: int64 [n].
        rows: [n, columns], in the dtype of the table unless a function says otherwise.
        state: optimizer state by name, [n, columns], or [n, 1] for one value per row. 8-bit state
            is uint8 [n, bytes]; bytes of one column shard follow those of another.
        scores: int64 [n] by name, such as ``"step"`` or ``"frequency"``.
        first_column: column of the table that ``rows`` begins with.
    """

    ids: Tensor
    rows: Tensor
    state: Mapping[str, Tensor] = _NONE
    scores: Mapping[str, Tensor] = _NONE
    first_column: int = 0

    @property
    def columns(self) -> range:
        """Columns of the table that ``rows`` has."""
        return range(self.first_column, self.first_column + self.rows.shape[1])

    def each(self, change: Callable[[Tensor], Tensor]) -> RowBatch:
        """Return a batch with all tensors changed in the same way.

        Args:
            change: returns the new tensor for one of n ids.
        """
        return RowBatch(
            change(self.ids),
            change(self.rows),
            {name: change(values) for name, values in self.state.items()},
            {name: change(values) for name, values in self.scores.items()},
            self.first_column,
        )

    def picked(self, places: Tensor | slice) -> RowBatch:
        """Return some ids.

        Args:
            places: int64 [m] or bool [n], or a slice, which copies nothing.
        """
        return self.each(lambda values: values[places])

    def blocks(self, size: int) -> Iterator[RowBatch]:
        """Yield views of at most ``size`` ids each.

        Args:
            size: at least 1.
        """
        for begin in range(0, self.ids.numel(), size):
            yield self.picked(slice(begin, begin + size))

    def to(self, device: torch.device | str) -> RowBatch:
        """Return the batch on a device.

        Args:
            device: of all tensors.
        """
        return self.each(lambda values: values.to(device))

    @staticmethod
    def without_rows(ids: Tensor, scores: Mapping[str, Tensor] = _NONE) -> RowBatch:
        """Return ids with their scores alone.

        Args:
            ids: int64 [n].
            scores: int64 [n] by name.
        """
        return RowBatch(ids, ids.new_empty(ids.numel(), 0), _NONE, scores)

    @staticmethod
    def joined(batches: Sequence[RowBatch]) -> RowBatch:
        """Concatenate batches of the same columns, state and scores.

        Args:
            batches: at least one.
        """
        first = batches[0]
        if len(batches) == 1:
            return first
        return RowBatch(
            torch.cat([of.ids for of in batches]),
            torch.cat([of.rows for of in batches]),
            {name: torch.cat([of.state[name] for of in batches]) for name in first.state},
            {name: torch.cat([of.scores[name] for of in batches]) for name in first.scores},
            first.first_column,
        )


__all__ = ["RowBatch"]
