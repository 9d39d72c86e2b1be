"""Gradients of rows between backward and optimizer step: split mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.functional_copies import refuse_copies
from torch_dynemb.ops.tensors import LookupBatch, RowTensors


class PendingGradients(NamedTuple):
    """Entries in order of arrival; each list has one tensor per slab.

    Attributes:
        handles, ids, tables: int64 [capacity]; the owner of the row.
        gradients: float32 [capacity, dim]; of the row, summed over one lookup.
        counts: int64 [slabs, 2]: number of entries, and of lookups that appended some since the
            last merge.
    """

    handles: list[Tensor]
    ids: list[Tensor]
    tables: list[Tensor]
    gradients: list[Tensor]
    counts: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> PendingGradients:
        """Build the record from the flat list of :class:`RowTensors`.

        Args:
            tensors: those of :meth:`flat`, such as ``pending`` of
                :class:`torch_dynemb.ops.RowTensors`.

        Raises:
            ValueError: the list does not have four tensors for each slab, and one.
        """
        if len(tensors) < 5 or len(tensors) % 4 != 1:
            raise ValueError(
                f"dynemb::accumulate_grad_: pending has {len(tensors)} tensors, expected 4 for "
                "each slab and their counts, as PendingGradients.flat() gives them"
            )
        *entries, counts = tensors
        slabs = len(entries) // 4
        handles, ids, tables, gradients = (
            entries[first : first + slabs] for first in range(0, len(entries), slabs)
        )
        return cls(handles, ids, tables, gradients, counts)

    def flat(self) -> list[Tensor]:
        """Return all tensors as one list."""
        return [*self.handles, *self.ids, *self.tables, *self.gradients, self.counts]


@raises_typed_errors
def accumulate_grad_(
    pending: PendingGradients,
    rows: RowTensors,
    grad_output: Tensor,
    batch: LookupBatch,
    handles: Tensor,
    updates: Tensor,
) -> None:
    """Append a lookup's gradient, summed by row; merge entries first if room is short.

    Args:
        pending: of all slabs of the rows; changes.
        rows: of the tables; row_clock changes.
        grad_output: float32 [B, sum of feature_dims] of a pooled lookup, [N, dim] of a sequence
            lookup.
        batch: of the lookup.
        handles: int64 [N], as passed to the lookup. Ids without a row are left out.
        updates: int64 [1], number of updates of the rows at the time of the lookup.

    Raises:
        RuntimeError: an argument does not fit, another thread changes the pending gradients, or
            room or memory is short. Or rows were updated after a lookup with per_sample_weights.
            Nothing has been appended. On a GPU, wrong values of tensors are reported by a later op.
    """
    ids, offsets, weights, *features = batch
    torch.ops.dynemb.accumulate_grad_(
        *pending,
        rows.row_clock,
        *rows.read,
        grad_output,
        ids,
        handles,
        offsets,
        weights,
        updates,
        *features,
    )


@raises_typed_errors
def merge_grad_(pending: PendingGradients, rows: RowTensors) -> None:
    """Sum the pending gradients of each row, in order of arrival.

    Afterwards entries have distinct rows. Entries with stale handles are dropped and counted in
    ``row_clock``.

    Args:
        pending: of all slabs of the rows; changes.
        rows: of the tables; row_clock changes.

    Raises:
        RuntimeError: tensors do not fit each other, an entry is not what :func:`accumulate_grad_`
            writes, or another thread changes the pending gradients.
    """
    torch.ops.dynemb.merge_grad_(*pending, rows.row_clock)


@register_fake("accumulate_grad_")
def _accumulate_fake(
    pending_handles: Sequence[Tensor],
    pending_ids: Sequence[Tensor],
    pending_tables: Sequence[Tensor],
    pending_gradients: Sequence[Tensor],
    pending_counts: Tensor,
    row_clock: Tensor,
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    meta: Tensor,
    init_data: Tensor,
    grad_output: Tensor,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    updates: Tensor,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    pooling: int,
) -> None:
    refuse_copies("accumulate_grad_", pending_handles, pending_ids, pending_gradients)


@register_fake("merge_grad_")
def _merge_fake(
    pending_handles: Sequence[Tensor],
    pending_ids: Sequence[Tensor],
    pending_tables: Sequence[Tensor],
    pending_gradients: Sequence[Tensor],
    pending_counts: Tensor,
    row_clock: Tensor,
) -> None:
    return None
