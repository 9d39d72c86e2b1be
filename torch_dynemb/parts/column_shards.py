"""Values per row, combined from column shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def combined_by_row(shards: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Combine values per row from column shards: their mean by columns, or the maximum of integers.

    Floating-point values are means over columns. The mean over all columns is that of the shards,
    weighted by their columns. Integers are counts of steps.

    Args:
        shards: number of columns of each shard, and its values, [n] of one dtype.

    Returns:
        [n] of that dtype.
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
    """Combine values per row of column shards into those of other columns, [n].

    Args:
        values: [n, shards].
        shards: columns of each shard.
        columns: columns of the result.
    """
    shared = [
        (min(of.stop, columns.stop) - max(of.start, columns.start), values[:, k])
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
    return torch.stack([by_row(values, shards, of) for of in columns], 1)


__all__ = ["by_row", "by_shard", "combined_by_row"]
