"""What the column shards of a row have together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def combined_by_row(shards: Sequence[tuple[int, Tensor]]) -> Tensor:
    """One value for each row: of several column shards the mean by columns, of steps the most.

    A value of a row is a mean over its columns, so that of all of them is the mean of the shards',
    weighted by their columns.

    Args:
        shards: columns of each, and what it keeps of the rows, [n] of one dtype.

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


__all__ = ["combined_by_row"]
