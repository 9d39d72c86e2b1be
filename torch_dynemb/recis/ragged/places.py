"""Positions of values of ragged rows in a dense tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Side = Literal["left", "right"]


def dense_places(offsets: Sequence[Tensor], sizes: Sequence[int], side: Side) -> Tensor:
    """Return positions of the values in the flattened dense tensor, int64 [N].

    Args:
        offsets: [rows + 1] each, outermost first.
        sizes: of the ragged dimensions in the dense tensor.
        side: side of the gap in shorter innermost rows.
    """
    rows = torch.arange(offsets[0].shape[0] - 1, device=offsets[0].device)
    for d, (bounds, size) in enumerate(zip(offsets, sizes, strict=True)):
        lengths = bounds.diff().to(torch.int64)
        begins = rows * size
        if side == "left" and d == len(offsets) - 1:
            begins = begins + size - lengths
        within = torch.arange(int(bounds[-1]), device=rows.device)
        within = within - bounds[:-1].to(torch.int64).repeat_interleave(lengths)
        rows = begins.repeat_interleave(lengths) + within
    return rows


__all__ = ["Side", "dense_places"]
