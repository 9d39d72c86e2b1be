"""Counting sketches of tables, and their combination over several parts.

A sketch counts ids that wait for admission (a count-min sketch; Cormode, Muthukrishnan 2005). In a
row of ``width`` cells, each cell counts the ids with a hash in one of ``width`` equal ranges.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb.ops.columns import SKETCH_ROWS, PolicyColumn
from torch_dynemb.table.group_config import GroupConfig

_MOST = (1 << 31) - 1


def combined_sketch(sketches: Sequence[Tensor], width: int) -> Tensor:
    """Combine sketches into one for all of their ids, or for some of these ids.

    With equal widths, cells are added, up to 2^31 - 1. Each count is an upper bound of that of one
    sketch of all ids. With another width, a new cell is the maximum of the old cells with
    overlapping ranges, also an upper bound.

    Args:
        sketches: int32 [rows, width of each], at least one.
        width: width of the result.

    Returns:
        int32 [rows, width].
    """
    total = torch.zeros(sketches[0].shape[0], width, dtype=torch.int64, device="cpu")
    for cells in sketches:
        total += _resized(cells.to(torch.int64), width)
    return total.clamp_(max=_MOST).to(torch.int32)


def _resized(cells: Tensor, width: int) -> Tensor:
    saved = cells.shape[1]
    if saved == width:
        return cells
    result = torch.zeros(cells.shape[0], width, dtype=cells.dtype, device="cpu")
    # Old cell i covers [i, i + 1) / saved of the hashes. Cut at the bounds of both widths, each
    # piece lies in one old cell and one new cell.
    new = torch.arange(width, device="cpu")
    first = new * saved // width
    last = ((new + 1) * saved + width - 1) // width - 1
    longest = int((last - first).max()) + 1
    for step in range(longest):
        old = torch.minimum(first + step, last)
        result = torch.maximum(result, cells[:, old])
    return result


def sketch_cells(config: GroupConfig, sketch: Tensor, table: int) -> Tensor | None:
    """Return the counting sketch of a table, int32 [rows, width]; None if it has none.

    Args:
        config: config of the group.
        sketch: int32 [cells], of the group.
        table: number of the table.
    """
    rows = config.layout.rows
    width = rows[table].get(PolicyColumn.SKETCH_WIDTH, 0) if rows else 0
    if width == 0:
        return None
    begin = rows[table][PolicyColumn.SKETCH_BEGIN]
    return sketch[begin : begin + SKETCH_ROWS * width].reshape(SKETCH_ROWS, width)


__all__ = ["combined_sketch", "sketch_cells"]
