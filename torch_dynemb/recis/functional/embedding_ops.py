"""RecIS's embedding_ops: ids of tables, and bags of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import described, integer, tensor
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.recis.arguments import bools, index_tensor, numbers, tensors
from torch_dynemb.recis.functional.ragged_ops import tiled

_POOLINGS = {"sum": Pooling.SUM, "mean": Pooling.MEAN}


def ids_partition(
    ids: Tensor, max_partition_num: int, world_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return distinct ids ordered by owning rank (:func:`torch_dynemb.ops.id_owners`).

    Args:
        ids: int64 [N].
        max_partition_num: slots into which ids are hashed.
        world_size: number of ranks, which own ranges of slots.

    Returns:
        Distinct ids, int64 [U]; number that each rank owns, int64 [world_size]; position of each id
        among the distinct ones, int64 [N].

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: ids are not int64 of 1 dimension, or there are more ranks than slots.
    """
    given = tensor("ids_partition: ids", ids).contiguous()
    slots = integer("ids_partition: max_partition_num", max_partition_num)
    ranks = integer("ids_partition: world_size", world_size)
    bounds = torch.tensor([0, given.numel()], device=given.device)
    parts = ops.ids_partition(given, bounds, parts=ranks, slots=slots)
    return parts.ids, parts.lengths[:, 0], parts.inverse


def ids_encode(ids_list: Sequence[Tensor], table_ids: Tensor | Sequence[int]) -> Tensor:
    """Encode ids of several tables, all 64 bits, as ids of one (torch_dynemb.ops.ids_encode).

    Args:
        ids_list: int64 [n] of each table.
        table_ids: int64 [tables] or a list: the number of each table.

    Returns:
        int64 [sum of n].

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: a dtype or shape does not match, or the lists differ in length.
    """
    given = tensors("ids_encode: ids_list", ids_list)
    return ops.ids_encode(given, numbers("ids_encode: table_ids", table_ids))


def merge_offsets(offsets: Sequence[Tensor]) -> Tensor:
    """Join the offsets of several features' bags.

    Args:
        offsets: int32 or int64 [bags + 1] of each feature, of one dtype.

    Returns:
        Of that dtype, [sum of bags + 1].

    Raises:
        TypeError: an entry is not a tensor of int32 or int64.
        ValueError: ``offsets`` is empty, or a shape or dtype does not match.

    Example:
        >>> merge_offsets([torch.tensor([0, 2, 5]), torch.tensor([0, 3, 6])])
        tensor([ 0,  2,  5,  8, 11])
    """
    given = tensors("merge_offsets: offsets", offsets)
    for i, of_feature in enumerate(given):
        index_tensor(f"merge_offsets: offsets[{i}]", of_feature)
        if of_feature.dim() != 1 or of_feature.dtype != given[0].dtype:
            raise ValueError(
                f"merge_offsets: offsets[{i}] is {described(of_feature)}, expected [bags + 1] of "
                f"the dtype of the first, {given[0].dtype}"
            )
    if not given:
        raise ValueError("merge_offsets: offsets is empty, expected those of at least one feature")
    lengths = torch.cat([of_feature.diff() for of_feature in given])
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])


def ragged_embedding_segment_reduce(
    unique_emb: Tensor,
    weight: Tensor | None,
    reverse_indices: Tensor,
    offsets: Tensor,
    combiner: str,
    combiner_kwargs: Mapping[str, Any] | None = None,
) -> Tensor:
    """Combine rows into bags; differentiable in rows and weights.

    Args:
        unique_emb: float32 [U, dim].
        weight: float32 [N], factors of the rows, or None.
        reverse_indices: [N], rows of the bags.
        offsets: [S + 1], where bags begin.
        combiner: "sum"; "mean", which divides by the sum of the weights, or by the count without
            weights; or "tile".
        combiner_kwargs: of "tile": ``bs``, ``tile_len`` and ``left_pad`` (a list of bool tensors):
            batch, seq and left_pad of :func:`ragged_tile`.

    Returns:
        float32 [S, dim], for "tile" as :func:`ragged_tile`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: another combiner.
        RuntimeError: a dtype or shape does not match, positions are outside of the rows, or offsets
            do not ascend from 0 to N.
    """
    owner = "ragged_embedding_segment_reduce"
    rows = tensor(f"{owner}: unique_emb", unique_emb).contiguous()
    positions = index_tensor(f"{owner}: reverse_indices", reverse_indices)
    bounds = index_tensor(f"{owner}: offsets", offsets)
    weights = None if weight is None else tensor(f"{owner}: weight", weight).contiguous()
    if combiner == "tile":
        tile = _tile_arguments(owner, combiner_kwargs)
        return tiled(owner, tile.bags, tile.lengths, positions, bounds, rows, tile.left, weights)
    pooling = _pooling(owner, combiner)
    return ops.pool_rows(rows, positions, bounds, features=1, weights=weights, pooling=pooling)


def sparse_embedding_segment_reduce(
    unique_emb: Tensor,
    weight: Tensor,
    reverse_indices: Tensor,
    segment_ids: Tensor,
    num_segments: int,
    combiner: str,
) -> Tensor:
    """Combine rows into segments; differentiable in rows and weights.

    Args:
        unique_emb: float32 [U, dim].
        weight: float32 [N], factors of the rows.
        reverse_indices: [N], rows of the segments.
        segment_ids: [N], in any order, 0 to ``num_segments`` - 1.
        num_segments: number of segments, including empty ones.
        combiner: "sum", or "mean", which divides by the sum of the weights.

    Returns:
        float32 [num_segments, dim].

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: another combiner.
        RuntimeError: a dtype or shape does not match, or positions are outside of the rows.
    """
    return _reduced_segments(
        "sparse_embedding_segment_reduce",
        {"unique_emb": unique_emb, "weight": weight, "reverse_indices": reverse_indices},
        segment_ids,
        num_segments,
        combiner,
    )


def segment_sum_sparse(
    data: Tensor, weight: Tensor | None, indices: Tensor, segment_ids: Tensor, num_segments: int
) -> Tensor:
    """Call :func:`sparse_embedding_segment_reduce` with "sum"; default weights are 1.

    Args:
        data: float32 [U, dim].
        weight: float32 [N], factors of the rows, or None.
        indices: [N], rows of the segments.
        segment_ids: [N], in any order, 0 to ``num_segments`` - 1.
        num_segments: number of segments, including empty ones.

    Returns:
        float32 [num_segments, dim].

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: a dtype or shape does not match, or positions are outside of the rows.
    """
    if weight is None:
        places = index_tensor("segment_sum_sparse: indices", indices)
        weight = torch.ones(places.shape, device=places.device)
    named = {"data": data, "weight": weight, "indices": indices}
    return _reduced_segments("segment_sum_sparse", named, segment_ids, num_segments, "sum")


def _reduced_segments(
    owner: str, named: Mapping[str, object], segment_ids: Tensor, num_segments: int, combiner: str
) -> Tensor:
    """Combine rows into segments.

    Args:
        owner: prefix of error messages.
        named: rows, weights and positions by the names of the caller's arguments, in this order.
        segment_ids, num_segments, combiner: as in :func:`sparse_embedding_segment_reduce`.
    """
    (rows_name, rows_given), (_, weight), (places_name, places_given) = named.items()
    rows = tensor(f"{owner}: {rows_name}", rows_given).contiguous()
    positions = index_tensor(f"{owner}: {places_name}", places_given)
    segments = index_tensor(f"{owner}: segment_ids", segment_ids)
    weights = tensor(f"{owner}: weight", weight)
    count = integer(f"{owner}: num_segments", num_segments, least=0)
    for name, given in (("segment_ids", segments), ("weight", weights)):
        if given.shape != positions.shape or given.dim() != 1:
            raise ValueError(
                f"{owner}: {name} has shape {tuple(given.shape)}, expected ({positions.numel()},), "
                f"one for each of {places_name}"
            )
    pooling = _pooling(owner, combiner)
    ordered, order = segments.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(count + 1, device=ordered.device))
    return ops.pool_rows(
        rows, positions[order], bounds, features=1, weights=weights[order], pooling=pooling
    )


class _TileArguments(NamedTuple):
    """Content of ``combiner_kwargs`` for "tile".

    Attributes:
        bags: number of bags of each feature.
        lengths: rows of a bag that each feature keeps.
        left: for each feature whether zeros stand before the rows.
    """

    bags: list[int]
    lengths: list[int]
    left: list[bool]


def _tile_arguments(owner: str, given: object) -> _TileArguments:
    if not isinstance(given, Mapping) or not {"bs", "tile_len"} <= given.keys():
        raise ValueError(
            f"{owner}: combiner_kwargs is {described(given)}, expected a dict with 'bs' and "
            "'tile_len' for combiner='tile'"
        )
    bags = numbers(f"{owner}: combiner_kwargs['bs']", given["bs"])
    lengths = numbers(f"{owner}: combiner_kwargs['tile_len']", given["tile_len"])
    left = [False] * len(bags)
    if "left_pad" in given:
        where = f"{owner}: combiner_kwargs['left_pad']"
        of_features = [side.reshape(-1) for side in tensors(where, given["left_pad"])]
        left = [side for of_one in of_features for side in bools(where, of_one)]
    return _TileArguments(bags, lengths, left)


def _pooling(op: str, combiner: object) -> Pooling:
    if not isinstance(combiner, str) or combiner not in _POOLINGS:
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
