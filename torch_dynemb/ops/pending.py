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
    """Entries in the order in which they came; each list has one tensor per slab.

    Attributes:
        handles, ids, tables: int64 [capacity]; what the row belongs to.
        gradients: float32 [capacity, dim]; of the row, summed over one lookup.
        counts: int64 [slabs, 2]: entries, and lookups that appended some since they were merged.
    """

    handles: list[Tensor]
    ids: list[Tensor]
    tables: list[Tensor]
    gradients: list[Tensor]
    counts: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> PendingGradients:
        """From the flat list that lookups carry.

        Args:
            tensors: those of :meth:`flat`, such as ``pending`` of
                :class:`torch_dynemb.ops.RowTensors`.

        Raises:
            ValueError: they are not four for each slab, and one.
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
        """All tensors as one list."""
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
    """Appends a lookup's gradient, summed by row; where room is short, entries are merged first.

    Args:
        pending: of all slabs of the rows; changes.
        rows: of the tables; row_clock changes.
        grad_output: float32 [B, sum of feature_dims] of a pooled lookup, [N, dim] of a sequence
            lookup.
        batch: of the lookup.
        handles: int64 [N], as the lookup got them. Ids without a row are left out.
        updates: int64 [1], how often the rows had been updated when they were looked up.

    Raises:
        RuntimeError: an argument does not fit the rows or the others; the rows were updated after a
            lookup with per_sample_weights; another thread changes the pending gradients; or there
            is too little room or memory. Nothing has been appended then. On a GPU, what is wrong
            with values of tensors is raised by a later op.
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
    """Sums the pending gradients of each row, in the order in which they came.

    Afterwards entries are of distinct rows. Those of rows that were given away meanwhile are
    dropped and counted in ``row_clock``.

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
