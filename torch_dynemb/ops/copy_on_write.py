"""Rows of a slab at one point in time, read by a thread while training writes them.

The slab has a copy-on-write vector (fields: ``CopyOnWrite`` in ``ops.columns``). While its first
field is not 0, ops that write rows first copy each unread row into the vector. If the vector is
full, they wait until the row has been read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.functional_copies import refuse_copies


@raises_typed_errors
def copy_before_write_(
    weights: Tensor, state: Sequence[Tensor], copy_on_write: Tensor, rows: Tensor
) -> None:
    """Copy rows for the thread that reads them, before they are written.

    Ops that write rows call this themselves.

    Args:
        weights: [all rows, dim] of the slab, on the CPU.
        state: its optimizer state, [all rows] or [all rows, columns] each.
        copy_on_write: int64 [words], copy-on-write vector of the slab; changes.
        rows: int64 [n], numbers of rows.

    Raises:
        RuntimeError: a row does not exist, or tensors do not fit each other; nothing has changed.
    """
    torch.ops.dynemb.copy_before_write_(weights, state, copy_on_write, rows)


@raises_typed_errors
def take_unchanged_rows_(
    weights: Tensor,
    state: Sequence[Tensor],
    copy_on_write: Tensor,
    rows: Tensor,
    out_weights: Tensor,
    out_state: Sequence[Tensor],
) -> None:
    """Read rows as they were when copy-on-write was activated, and release their copies.

    Other threads may write the rows meanwhile. Only one thread may read.

    Args:
        weights: [all rows, dim] of the slab, on the CPU.
        state: its optimizer state, [all rows] or [all rows, columns] each.
        copy_on_write: int64 [words], copy-on-write vector of the slab; changes.
        rows: int64 [n], numbers of rows.
        out_weights: [n or more, dim], receives the weights.
        out_state: [n or more] or [n or more, columns] each, as many as ``state``; receive the
            optimizer state.

    Raises:
        RuntimeError: a row does not exist, or tensors do not fit each other; nothing has changed.
    """
    torch.ops.dynemb.take_unchanged_rows_(
        weights, state, copy_on_write, rows, out_weights, out_state
    )


@register_fake("copy_before_write_")
def _copy_before_write_fake(
    weights: Tensor, state: Sequence[Tensor], copy_on_write: Tensor, rows: Tensor
) -> None:
    refuse_copies("copy_before_write_", copy_on_write)


@register_fake("take_unchanged_rows_")
def _take_unchanged_rows_fake(
    weights: Tensor,
    state: Sequence[Tensor],
    copy_on_write: Tensor,
    rows: Tensor,
    out_weights: Tensor,
    out_state: Sequence[Tensor],
) -> None:
    refuse_copies("take_unchanged_rows_", copy_on_write)
