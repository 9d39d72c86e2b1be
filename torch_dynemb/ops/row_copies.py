"""Copies of consecutive rows, which on a GPU may lie partly in HBM and partly in host memory.

The driver takes a range for memory of the place where it begins. So kernels read and write rows on
a GPU, and the driver only copies what kernels have gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE_BYTES = 64 << 20  # that are gathered at once


def copied_rows(rows: Tensor) -> Tensor:
    """Copy rows on their device.

    Args:
        rows: [n, ...], consecutive rows of a table, contiguous.
    """
    return rows.index_select(0, _numbers(rows)) if _on_gpu(rows) else rows.clone()


def rows_on_host(rows: Tensor) -> Tensor:
    """Return rows on the CPU, without a copy if they are there.

    Args:
        rows: see :func:`copied_rows`; on a GPU, a second copy of them fits into its memory.
    """
    return copied_rows(rows).cpu() if _on_gpu(rows) else rows


def read_rows_(out: Tensor, rows: Tensor) -> None:
    """Copy rows into a tensor of any device, in pieces.

    Args:
        out: as ``rows``; all values change.
        rows: see :func:`copied_rows`.
    """
    if rows.dim() == 0 or not _on_gpu(rows):
        out.copy_(rows)
        return
    step = max(1, _PIECE_BYTES // max(1, rows.element_size() * rows[:1].numel()))
    for begin in range(0, rows.shape[0], step):
        out[begin : begin + step].copy_(copied_rows(rows[begin : begin + step]))


def put_rows_(rows: Tensor, values: Tensor) -> None:
    """Write values of any device and dtype into rows.

    Args:
        rows: see :func:`copied_rows`, or some of their columns; all values change.
        values: of the same shape.
    """
    if rows.dim() == 0 or not _on_gpu(rows):
        rows.copy_(values)
        return
    step = max(1, _PIECE_BYTES // max(1, rows.element_size() * rows[:1].numel()))
    for begin in range(0, rows.shape[0], step):
        piece = rows[begin : begin + step]
        own = values[begin : begin + step].to(rows.device, rows.dtype)
        piece.index_copy_(0, _numbers(piece), own)


def _on_gpu(rows: Tensor) -> bool:
    return rows.is_cuda


def _numbers(rows: Tensor) -> Tensor:
    return torch.arange(rows.shape[0], device=rows.device)


__all__ = ["copied_rows", "put_rows_", "read_rows_", "rows_on_host"]
