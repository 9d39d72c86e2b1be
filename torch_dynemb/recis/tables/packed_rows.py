"""8-bit rows with a scale, packed into float32 columns, which lookups copy unchanged."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 127.0


def packed_columns(dim: int) -> int:
    """Return the float32 columns of a row: its int8 values, four to a column, and its scale."""
    return -(-dim // 4) + 1


def pack_rows(rows: Tensor) -> Tensor:
    """Pack float [n, dim] as float32 [n, packed_columns(dim)].

    Values are rounded to multiples of the scale, the largest magnitude of the row / 127.
    """
    rows = rows.detach().to(torch.float32)
    scale = rows.abs().amax(1, keepdim=True) / _LARGEST
    steps = torch.where(scale > 0, rows / scale, torch.zeros_like(rows)).round()
    codes = torch.nn.functional.pad(steps.to(torch.int8), (0, -rows.shape[1] % 4))
    return torch.cat([codes.contiguous().view(torch.float32), scale], 1)


def unpack_int8(packed: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Unpack the result of :func:`pack_rows` to [..., dim] of ``dtype``; packed zeros are zeros."""
    codes = packed[..., :-1].contiguous().view(torch.int8)[..., :dim]
    return (codes.to(torch.float32) * packed[..., -1:]).to(dtype)


__all__ = ["pack_rows", "packed_columns", "unpack_int8"]
