"""Gradients of a lookup: of the rows, reduced by row, and of ``per_sample_weights``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.tensors import LookupBatch, RowTensors


class ReducedGradients(NamedTuple):
    """Result of :func:`reduce_grad`; each list has one tensor per slab, with room for N entries.

    Attributes:
        handles, ids, tables: int64 [N] each: the owner of the row, ascending by row. For many
            occurrences on the CPU they ascend by table, then by row.
        gradients: float32 [N, dim]; sum of the gradients of the row's occurrences.
        counts: int64 [slabs]; number of entries that are set; the others are zeros.
    """

    handles: list[Tensor]
    ids: list[Tensor]
    tables: list[Tensor]
    gradients: list[Tensor]
    counts: Tensor


@raises_typed_errors
def reduce_grad(
    rows: RowTensors, grad_output: Tensor, batch: LookupBatch, handles: Tensor
) -> ReducedGradients:
    """Sum a lookup's gradient by row, in fp32 and in order of occurrence: deterministic.

    Args:
        rows: of the tables; nothing changes.
        grad_output: float32 [B, sum of feature_dims] of a pooled lookup, [N, dim] of a sequence
            lookup.
        batch: of the lookup.
        handles: int64 [N], as passed to the lookup. Ids without a row have no entry.

    Raises:
        RuntimeError: an argument does not fit the rows or the others, there are 2^31 bags or more,
            or memory is short. On a GPU, wrong values of tensors are reported by a later op.
    """
    ids, offsets, weights, *features = batch
    reduced = torch.ops.dynemb.reduce_grad(
        *rows.read, grad_output, ids, handles, offsets, weights, *features
    )
    return ReducedGradients(*reduced)


@raises_typed_errors
def bag_weight_grad(
    rows: RowTensors, grad_output: Tensor, batch: LookupBatch, handles: Tensor
) -> Tensor:
    """Compute the gradient of ``per_sample_weights`` of a pooled lookup from the rows it has read.

    Args:
        rows: of the tables, not updated since the lookup; nothing changes.
        grad_output: float32 [B, sum of feature_dims].
        batch: of the lookup, with weights.
        handles: int64 [N], as passed to the lookup.

    Returns:
        float32 [N]; 0 for padding ids.

    Raises:
        RuntimeError: pooling is 2 (none), or as :func:`reduce_grad`.
    """
    ids, offsets, weights, *features = batch
    gradient: Tensor = torch.ops.dynemb.bag_weight_grad(
        *rows.read, grad_output, ids, handles, offsets, weights, *features
    )
    return gradient


@register_fake("reduce_grad")
def _reduce_grad_fake(
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    meta: Tensor,
    init_data: Tensor,
    grad_output: Tensor,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    pooling: int,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Tensor]:
    count = ids.shape[0]
    return (
        [torch.empty_like(ids) for _ in weights],
        [torch.empty_like(ids) for _ in weights],
        [torch.empty_like(ids) for _ in weights],
        [grad_output.new_empty((count, slab.shape[1])) for slab in weights],
        ids.new_empty((len(weights),)),
    )


@register_fake("bag_weight_grad")
def _bag_weight_grad_fake(
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    meta: Tensor,
    init_data: Tensor,
    grad_output: Tensor,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    pooling: int,
) -> Tensor:
    return torch.empty_like(per_sample_weights)
