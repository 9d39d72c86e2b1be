"""Ids of tables and bags of rows: RecIS's embedding_ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.recis.functional.arguments import numbers
from torch_dynemb.recis.functional.ragged_ops import tiled
from torch_dynemb.recis.ragged.offsets import words

_POOLINGS = {"sum": Pooling.SUM, "mean": Pooling.MEAN}


def ids_partition(
    ids: Tensor, max_partition_num: int, world_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct ids, ordered by the rank that owns them (:func:`torch_dynemb.ops.id_owners`).

    Args:
        ids: int64 [N].
        max_partition_num: slots into which ids are hashed.
        world_size: number of ranks, which own ranges of slots.

    Returns:
        Distinct ids, int64 [U]; how many each rank owns, int64 [world_size]; and for each id its
        place among them, int64 [N].

    Raises:
        RuntimeError: ids are not int64 of 1 dimension, or there are more ranks than slots.
    """
    bounds = torch.tensor([0, ids.numel()], device=ids.device)
    parts = ops.ids_partition(ids, bounds, parts=world_size, slots=max_partition_num)
    return parts.ids, parts.lengths[:, 0], parts.inverse


def ids_encode(ids_list: Sequence[Tensor], table_ids: Tensor | Sequence[int]) -> Tensor:
    """Ids of several tables as ids of one, of all 64 bits (:func:`torch_dynemb.ops.ids_encode`).

    Args:
        ids_list: int64 [n] of each table.
        table_ids: int64 [tables] or a list: the number of each table.

    Returns:
        int64 [sum of n].

    Raises:
        RuntimeError: a dtype or shape does not match, or the lists differ in length.
    """
    return ops.ids_encode([ids.contiguous() for ids in ids_list], numbers(table_ids))


def merge_offsets(offsets: Sequence[Tensor]) -> Tensor:
    """Offsets of the bags of several features, one after another.

    Args:
        offsets: int32 or int64 [bags + 1] of each feature, of one dtype.

    Returns:
        Of that dtype, [sum of bags + 1].

    Example:
        >>> merge_offsets([torch.tensor([0, 2, 5]), torch.tensor([0, 3, 6])])
        tensor([ 0,  2,  5,  8, 11])
    """
    lengths = torch.cat([of_feature.diff() for of_feature in offsets])
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])


def ragged_embedding_segment_reduce(
    unique_emb: Tensor,
    weight: Tensor | None,
    reverse_indices: Tensor,
    offsets: Tensor,
    combiner: str,
    combiner_kwargs: Mapping[str, Any] | None = None,
) -> Tensor:
    """Bags of rows, combined; differentiable in rows and weights.

    Args:
        unique_emb: float32 [U, dim].
        weight: float32 [N], factors of the rows, or None.
        reverse_indices: [N], rows of the bags.
        offsets: [S + 1], where bags begin.
        combiner: "sum"; "mean", which divides by the sum of the weights, or the count without; or
            "tile".
        combiner_kwargs: of "tile": ``bs``, ``tile_len`` and ``left_pad`` (a list of bool tensors):
            batch, seq and left_pad of :func:`ragged_tile`.

    Returns:
        float32 [S, dim], for "tile" as :func:`ragged_tile`.

    Raises:
        ValueError: another combiner.
        RuntimeError: a dtype or shape does not match, places are none of rows, or offsets do not
            ascend from 0 to N.
    """
    if combiner == "tile":
        given = dict(combiner_kwargs or {})
        left = torch.cat(list(given["left_pad"])) if "left_pad" in given else None
        batch, seq = numbers(given["bs"]), numbers(given["tile_len"])
        return tiled(batch, seq, reverse_indices, offsets, unique_emb, left, weight)
    return ops.pool_rows(
        unique_emb,
        words(reverse_indices),
        words(offsets),
        features=1,
        weights=weight,
        pooling=_pooling("ragged_embedding_segment_reduce", combiner),
    )


def sparse_embedding_segment_reduce(
    unique_emb: Tensor,
    weight: Tensor,
    reverse_indices: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    combiner: str,
) -> Tensor:
    """Segments of rows, combined; differentiable in rows and weights.

    Args:
        unique_emb: float32 [U, dim].
        weight: float32 [N], factors of the rows.
        reverse_indices: [N], rows of the segments.
        segment_ids: [N], in any order, 0 to ``num_segments`` - 1.
        num_segments: how many there are, those without rows included.
        combiner: "sum", or "mean", which divides by the sum of the weights.

    Returns:
        float32 [num_segments, dim].

    Raises:
        ValueError: another combiner.
        RuntimeError: a dtype or shape does not match, or places are none of rows.
    """
    pooling = _pooling("sparse_embedding_segment_reduce", combiner)
    ordered, order = segment_ids.sort(stable=True)
    bounds = torch.arange(num_segments + 1, device=ordered.device, dtype=ordered.dtype)
    return ops.pool_rows(
        unique_emb,
        words(reverse_indices)[order],
        torch.searchsorted(ordered, bounds),
        features=1,
        weights=weight[order],
        pooling=pooling,
    )


def segment_sum_sparse(
    data: Tensor, weight: Tensor | None, indices: Tensor, segment_ids: Tensor, num_segments: int
) -> Tensor:
    """:func:`sparse_embedding_segment_reduce` with "sum"; without weights they are 1.

    Args:
        data: float32 [U, dim].
        weight: float32 [N], factors of the rows, or None.
        indices: [N], rows of the segments.
        segment_ids: [N], in any order, 0 to ``num_segments`` - 1.
        num_segments: how many there are, those without rows included.

    Returns:
        float32 [num_segments, dim].

    Raises:
        RuntimeError: a dtype or shape does not match, or places are none of rows.
    """
    factors = torch.ones(indices.shape[0], device=data.device) if weight is None else weight
    return sparse_embedding_segment_reduce(data, factors, indices, segment_ids, num_segments, "sum")


def _pooling(op: str, combiner: str) -> Pooling:
    if combiner not in _POOLINGS:
        raise ValueError(f"{op}: combiner is {combiner!r}, expected one of {list(_POOLINGS)}")
    return _POOLINGS[combiner]


__all__ = [
    "ids_encode",
    "ids_partition",
    "merge_offsets",
    "ragged_embedding_segment_reduce",
    "segment_sum_sparse",
    "sparse_embedding_segment_reduce",
]
