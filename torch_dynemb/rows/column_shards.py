"""Rows with all columns, from column shards."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from torch_dynemb.table.row_batch import RowBatch


def combined_by_row(shards: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Combine values per row from column shards: their mean by columns, or the maximum of integers.

    Floating-point values are means over columns. The mean over all columns is that of the shards,
    weighted by their columns. Integers are counts of steps.

    Args:
        shards: number of columns of each shard, and its values, [n, 1] of one dtype.

    Returns:
        [n, 1] of that dtype.
    """
    if len(shards) == 1:
        return shards[0][1]
    if not shards[0][1].dtype.is_floating_point:
        return torch.stack([values for _, values in shards]).amax(0)
    columns = sum(width for width, _ in shards)
    total = torch.zeros_like(shards[0][1], dtype=torch.float64)
    for width, values in shards:
        total += values.double() * (width / columns)
    return total.to(shards[0][1].dtype)


def by_row(values: Tensor, shards: Sequence[range], columns: range) -> Tensor:
    """Combine values per row of column shards into those of other columns, [n, 1].

    Args:
        values: [n, shards].
        shards: columns of each shard.
        columns: columns of the result.
    """
    shared = [
        (min(of.stop, columns.stop) - max(of.start, columns.start), values[:, k : k + 1])
        for k, of in enumerate(shards)
    ]
    return combined_by_row([(width, of) for width, of in shared if width > 0])


def by_shard(values: Tensor, shards: Sequence[range], columns: Sequence[range]) -> Tensor:
    """Combine values per row of column shards into those of others, [n, others].

    Args:
        values: [n, shards].
        shards: columns of each shard.
        columns: columns of each of the others.
    """
    return torch.cat([by_row(values, shards, of) for of in columns], 1)


def whole_rows(
    shards: Sequence[RowBatch],
    per_row: Collection[str],
    columns: Sequence[range] | None = None,
) -> RowBatch:
    """Combine column shards of the same ids into rows with all columns.

    Args:
        shards: by column; scores are those of the first.
        per_row: names of state with one value per row.
        columns: of the shards that such state is for, [n, shards]; None: of the whole rows, [n, 1].
    """
    first = shards[0]
    state = {}
    for name in first.state:
        values = [of.state[name] for of in shards]
        if name not in per_row:
            state[name] = side_by_side(values)
        elif columns is None:
            widths = [len(of.columns) for of in shards]
            state[name] = combined_by_row(list(zip(widths, values, strict=True)))
        else:
            state[name] = by_shard(side_by_side(values), [of.columns for of in shards], columns)
    return first._replace(rows=side_by_side([of.rows for of in shards]), state=state)


def side_by_side(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate columns; a single piece is returned as it is."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), 1)


__all__ = ["by_row", "by_shard", "combined_by_row", "side_by_side", "whole_rows"]
