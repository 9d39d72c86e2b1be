"""Rows of a slab as they were at one time, read by another thread while training writes them.

The slab has a vector of copy-on-write words (``CopyOnWrite`` in ``ops.columns`` names them).
While the first one is not 0, ops that write rows copy a row that has not been read yet into the
vector before they write it; where that has no room, they wait until it has been read.
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
    """Keeps rows as they are for the thread that reads them, before they are written.

    Ops that write rows do so themselves.

    Args:
        weights: [all rows, dim] of the slab, on the CPU.
        state: its optimizer state, [all rows] or [all rows, columns] each.
        copy_on_write: int64 [words] of the slab, which change.
        rows: int64 [n], numbers of rows.

    Raises:
        RuntimeError: there are no such rows, or tensors do not fit each other; nothing has changed.
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
    """Copies rows as they were when the words were made active; they are not preserved any longer.

    Other threads may write them meanwhile. One thread may read.

    Args:
        weights: [all rows, dim] of the slab, on the CPU.
        state: its optimizer state, [all rows] or [all rows, columns] each.
        copy_on_write: int64 [words] of the slab, which change.
        rows: int64 [n], numbers of rows.
        out_weights: [n or more, dim], gets the weights.
        out_state: [n or more] or [n or more, columns] each, get the optimizer state; as many as
            ``state`` has.

    Raises:
        RuntimeError: there are no such rows, or tensors do not fit each other; nothing has changed.
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
