"""Gradients of rows between backward and optimizer step: split mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_out_of_memory, register_fake
from torch_dynemb.ops.functional_copies import refuse_copies


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
        """From the flat list that lookups carry."""
        *entries, counts = tensors
        slabs = len(entries) // 4
        handles, ids, tables, gradients = (
            entries[first : first + slabs] for first in range(0, len(entries), slabs)
        )
        return cls(handles, ids, tables, gradients, counts)

    def flat(self) -> list[Tensor]:
        """All tensors as one list."""
        return [*self.handles, *self.ids, *self.tables, *self.gradients, self.counts]


@raises_out_of_memory
def merge_grad_(pending: PendingGradients, row_clock: Tensor) -> None:
    """Sums the pending gradients of each row, in the order in which they came.

    Afterwards entries are of distinct rows. Those of rows that were given away meanwhile are
    dropped and counted in ``row_clock``.
    """
    torch.ops.dynemb.merge_grad_(*pending, row_clock)


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
