"""Counting sketches of several parts of a table as one.

A sketch counts ids that wait for admission (a count-min sketch; Cormode, Muthukrishnan 2005). A
cell of a row of ``width`` cells has the ids whose hash lies in one of ``width`` equal ranges.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MOST = (1 << 31) - 1


def combined_sketch(sketches: Sequence[Tensor], width: int) -> Tensor:
    """A sketch of the ids of all of them, or of some of these ids.

    Where the widths are equal, it is the sum of the cells, at most 2^31 - 1: a count is an upper
    bound of what one sketch of all ids would have said, and so never too small. Of another width,
    a cell gets the most of the cells whose ranges meet its own, which is an upper bound, too.

    Args:
        sketches: int32 [rows, width of each], at least one.
        width: of the result.

    Returns:
        int32 [rows, width].
    """
    total = torch.zeros(sketches[0].shape[0], width, dtype=torch.int64)
    for cells in sketches:
        total += _resized(cells.to(torch.int64), width)
    return total.clamp_(max=_MOST).to(torch.int32)


def _resized(cells: Tensor, width: int) -> Tensor:
    saved = cells.shape[1]
    if saved == width:
        return cells
    result = torch.zeros(cells.shape[0], width, dtype=cells.dtype)
    # Cell i of the old ones has [i, i + 1) / saved of the hashes. Cut at the bounds of both, each
    # piece lies in one old cell and one new one.
    new = torch.arange(width)
    first = new * saved // width
    last = ((new + 1) * saved + width - 1) // width - 1
    longest = int((last - first).max()) + 1
    for step in range(longest):
        old = torch.minimum(first + step, last)
        result = torch.maximum(result, cells[:, old])
    return result


__all__ = ["combined_sketch"]
