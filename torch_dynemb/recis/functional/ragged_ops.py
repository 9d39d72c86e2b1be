"""RecIS's ragged_ops: ragged rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import described, flag, number
from torch_dynemb.argument_checks import tensor as checked_tensor
from torch_dynemb.recis.arguments import (
    bools,
    entries,
    index_tensor,
    index_tensors,
    numbers,
    tensors,
)
from torch_dynemb.recis.ragged.offsets import as_int64
from torch_dynemb.recis.ragged.tensor import RaggedTensor


def dense_to_ragged(
    tensor: Tensor, check_invalid: bool = False, invalid_value: float = 0
) -> tuple[Tensor, list[Tensor]]:
    """Return values and offsets of the rows of a tensor of at least 2 dimensions.

    Args:
        tensor: [n0, ..., nk] of any dtype, k at least 1.
        check_invalid: remove the trailing run of ``invalid_value`` from each row of the last
            dimension.
        invalid_value: padding at the ends of rows.

    Returns:
        Values, and int32 offsets (int64 for 2^31 elements and more), outermost first.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``tensor`` has less than 2 dimensions, or ``invalid_value`` is NaN.

    Example:
        >>> dense_to_ragged(torch.tensor([[1, 2, 0], [0, 3, 4]]), check_invalid=True)
        (tensor([1, 2, 0, 3, 4]), [tensor([0, 2, 5], dtype=torch.int32)])
    """
    checked_tensor("dense_to_ragged: tensor", tensor)
    flag("dense_to_ragged: check_invalid", check_invalid)
    number("dense_to_ragged: invalid_value", invalid_value)
    ragged = RaggedTensor.from_dense(tensor, check_invalid, invalid_value)
    dtype = torch.int32 if tensor.numel() < 2**31 else torch.int64
    return ragged.values(), [offsets.to(dtype) for offsets in ragged.offsets()]


def ragged_to_dense(values: Tensor, offsets: Sequence[Tensor], default_value: float) -> Tensor:
    """Convert ragged rows of any depth to a dense tensor.

    Args:
        values: [N] or [N, ...] of any dtype.
        offsets: int32 or int64 [rows + 1] each, outermost first.
        default_value: fills shorter rows.

    Returns:
        Of the dtype of the values, [rows, longest row, ...].

    Raises:
        TypeError, ValueError: as :class:`torch_dynemb.recis.RaggedTensor`.
    """
    number("ragged_to_dense: default_value", default_value)
    return RaggedTensor(values, offsets).to_dense(default_value)


def ragged_to_sparse(values: Tensor, row_splits: Sequence[Tensor]) -> Tensor:
    """Convert ragged rows of any depth to a coalesced sparse COO tensor.

    Args:
        values: [N] of any dtype.
        row_splits: int32 or int64 [rows + 1] each, outermost first.

    Returns:
        Of the dtype of the values, [rows, longest row, ...].

    Raises:
        TypeError, ValueError: as :class:`torch_dynemb.recis.RaggedTensor`.
    """
    return RaggedTensor(values, row_splits).to_sparse()


def fused_ragged_cutoff_2D(  # noqa: N802 - RecIS's name
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    keep_lengths: Tensor | Sequence[int],
    drop_sides: Tensor | Sequence[bool],
    pad_sides: Tensor,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Any, Tensor]:
    """Cut every row to at most ``keep_length`` values, for several features.

    Args:
        values: [N] for each feature.
        offsets: [rows + 1] for each feature.
        keep_lengths: int64 [features] or a list: values that a row keeps, at least 0.
        drop_sides: bool [features] or a list: whether longer rows lose their first values.
        pad_sides: returned as given: rows are not padded.

    Returns:
        Values, offsets, number of values that each row has lost, number that it lacks (both int32
        [rows]), ``drop_sides`` and ``pad_sides``.

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: a dtype or shape does not match, the lists differ in length, a number is
            negative, or offsets do not ascend from 0 to N.
    """
    owner = "fused_ragged_cutoff_2D"
    keep = numbers(f"{owner}: keep_lengths", keep_lengths)
    cut = ops.ragged_cutoff_2d(
        tensors(f"{owner}: values", values),
        index_tensors(f"{owner}: offsets", offsets),
        keep,
        drop_left=bools(f"{owner}: drop_sides", drop_sides),
    )
    excess = [
        (of_feature.diff() - length).int() for of_feature, length in zip(offsets, keep, strict=True)
    ]
    return (
        cut.values,
        [o.to(given.dtype) for o, given in zip(cut.offsets, offsets, strict=True)],
        [more.clamp(min=0) for more in excess],
        [(-more).clamp(min=0) for more in excess],
        drop_sides,
        pad_sides,
    )


def fused_ragged_cutoff_3D(  # noqa: N802 - RecIS's name
    values: Sequence[Tensor],
    offsets: Sequence[Sequence[Tensor]],
    keep_lengths: Tensor | Sequence[int],
    drop_sides: Tensor | Sequence[bool] | None = None,
    pad_sides: Tensor | Sequence[bool] | None = None,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Cut or fill every row to exactly ``keep_length`` inner lists, for several features.

    Args:
        values: [N] for each feature.
        offsets: outer [rows + 1] and inner [lists + 1] for each feature.
        keep_lengths: int64 [features] or a list: lists that a row has afterwards, at least 0.
        drop_sides: bool [features] or a list: whether longer rows lose their first lists; default:
            their last.
        pad_sides: bool [features] or a list: whether empty lists stand before those of a shorter
            row; default: after them.

    Returns:
        Values, and outer and inner offsets for each feature.

    Raises:
        TypeError: an argument has a wrong type.
        RuntimeError: a dtype or shape does not match, or the lists differ in length. A number is
            negative. Offsets do not ascend from 0 to the number of lists or values.
    """
    owner = "fused_ragged_cutoff_3D"
    pairs_given = entries(f"{owner}: offsets", offsets, "a list of pairs of Tensors")
    for i, pair in enumerate(pairs_given):
        where = f"{owner}: offsets[{i}]"
        if len(index_tensors(where, pair)) != 2:
            raise ValueError(f"{where} has {len(pair)} entries, expected outer and inner offsets")
    cut = ops.ragged_cutoff_3d(
        tensors(f"{owner}: values", values),
        [index_tensor(owner, outer) for outer, _ in pairs_given],
        [index_tensor(owner, inner) for _, inner in pairs_given],
        numbers(f"{owner}: keep_lengths", keep_lengths),
        drop_left=None if drop_sides is None else bools(f"{owner}: drop_sides", drop_sides),
        pad_left=None if pad_sides is None else bools(f"{owner}: pad_sides", pad_sides),
    )
    pairs = zip(cut.outer_offsets, cut.inner_offsets, offsets, strict=True)
    return cut.values, [[a.to(given[0].dtype), b.to(given[1].dtype)] for a, b, given in pairs]


def feature_cross_ragged(
    x_val: Tensor,
    x_offsets: Tensor,
    y_val: Tensor,
    y_offsets: Tensor,
    x_weight: Tensor | None = None,
    y_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids of all pairs of distinct ids (:func:`torch_dynemb.ops.feature_cross_ragged`).

    Args:
        x_val, y_val: int64 [N].
        x_offsets, y_offsets: [rows + 1], with the same number of rows.
        x_weight, y_weight: float32 [N]; default: ones.

    Returns:
        Ids int64 [M], offsets [rows + 1], and a weight for each id, float32 [M].

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: weights require grad, which is not supported.
        RuntimeError: a dtype or shape does not match, or offsets do not ascend from 0 to N.
    """
    owner = "feature_cross_ragged"
    weights = [
        given if given is None else checked_tensor(f"{owner}: {name}", given).contiguous()
        for name, given in (("x_weight", x_weight), ("y_weight", y_weight))
    ]
    crossed = ops.feature_cross_ragged(
        [checked_tensor(f"{owner}: x_val", x_val).contiguous()],
        [index_tensor(f"{owner}: x_offsets", x_offsets)],
        [checked_tensor(f"{owner}: y_val", y_val).contiguous()],
        [index_tensor(f"{owner}: y_offsets", y_offsets)],
        x_weights=weights[:1],
        y_weights=weights[1:],
    )
    return crossed.values[0], crossed.offsets[0].to(x_offsets.dtype), crossed.weights[0]


def ragged_tile(
    batch: Sequence[int],
    seq: Sequence[int],
    indices: Tensor,
    offset: Tensor,
    table: Tensor,
    left_pad: Tensor | None = None,
) -> Tensor:
    """Return the first ``seq`` rows of each bag of several features; differentiable in ``table``.

    Args:
        batch: number of bags of each feature.
        seq: number of rows of a bag that each feature keeps.
        indices: [N], rows of the bags, feature after feature.
        offset: [sum of batch + 1], where bags begin in ``indices``.
        table: float32 [U, dim].
        left_pad: bool [features], whether zeros stand before the rows of a shorter bag; default:
            after them.

    Returns:
        float32 [sum of batch * seq, dim].

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a number of ``seq`` is less than 1, or the lists differ in length.
        RuntimeError: a dtype or shape does not match, indices are outside of the rows, or offsets
            do not ascend.
    """
    owner = "ragged_tile"
    bags = numbers(f"{owner}: batch", batch)
    return tiled(
        owner,
        bags,
        numbers(f"{owner}: seq", seq),
        index_tensor(f"{owner}: indices", indices),
        index_tensor(f"{owner}: offset", offset),
        checked_tensor(f"{owner}: table", table),
        [False] * len(bags) if left_pad is None else bools(f"{owner}: left_pad", left_pad),
        None,
    )


def tiled(
    owner: str,
    batch: Sequence[int],
    seq: Sequence[int],
    positions: Tensor,
    offsets: Tensor,
    table: Tensor,
    sides: Sequence[bool],
    weight: Tensor | None,
) -> Tensor:
    """Tile as :func:`ragged_tile`, with factors of the rows.

    Args:
        owner: prefix of error messages.
        batch, seq: as there.
        positions: int64 [N], its ``indices``.
        offsets: int64 [sum of batch + 1].
        table: as there.
        sides: its ``left_pad``.
        weight: float32 [N] or None.
    """
    if not len(batch) == len(seq) == len(sides) > 0:
        raise ValueError(
            f"{owner}: {len(batch)} numbers of bags, {len(seq)} lengths of tiles and {len(sides)} "
            "sides, expected one of each for each feature"
        )
    if min(batch) < 0 or offsets.dim() != 1 or offsets.shape[0] != sum(batch) + 1:
        raise ValueError(
            f"{owner}: bags are {list(batch)}, but offsets have shape {tuple(offsets.shape)}, "
            "expected (sum of bags + 1,)"
        )
    if positions.dim() != 1 or (weight is not None and weight.shape != positions.shape):
        raise ValueError(
            f"{owner}: indices are {described(positions)} and weights "
            f"{described(weight)}, expected (N,) of both"
        )
    if table.dim() != 2:
        raise ValueError(f"{owner}: the table has shape {tuple(table.shape)}, expected (U, dim)")
    tiles: list[Tensor] = []
    begin = 0
    for bags, length, left in zip(batch, seq, sides, strict=True):
        of_feature = offsets[begin : begin + bags + 1]
        begin += bags
        first, last = of_feature[[0, -1]].tolist()
        (tile,) = ops.ragged_tile(
            table,
            positions[first:last],
            of_feature - first,
            features=1,
            tile_lens=[length],
            pad_left=[bool(left)],
            weights=None if weight is None else weight[first:last],
        )
        tiles.append(tile.reshape(bags * length, table.shape[1]))
    return torch.cat(tiles)


def compute_real_length(item_ragged: RaggedTensor, seller_ragged: RaggedTensor) -> Tensor:
    """Count the places of each sequence that have a value in both features.

    A place has a list of values, or of strings. A value is there if it is not 0, a string if it is
    neither empty nor "0".

    Args:
        item_ragged: with two ragged dimensions; or three, for strings of int8 or uint8.
        seller_ragged: with as many dimensions, and as many places in each sequence.

    Returns:
        float32 [sequences].

    Raises:
        TypeError: an argument is not a RaggedTensor, or strings have another dtype.
        ValueError: another number of dimensions, or of places.

    Example:
        >>> sequences = torch.tensor([0, 2, 3])
        >>> items = RaggedTensor(torch.tensor([7, 0, 8]), [sequences, torch.arange(4)])
        >>> sellers = RaggedTensor(torch.tensor([1, 2, 0]), [sequences, torch.arange(4)])
        >>> compute_real_length(items, sellers)
        tensor([1., 0.])
    """
    owner = "compute_real_length"
    named = {"item_ragged": item_ragged, "seller_ragged": seller_ragged}
    filled = [_filled_places(f"{owner}: {name}", given) for name, given in named.items()]
    sequences = [as_int64(given.offsets()[0]) for given in named.values()]
    if any(a.shape != b.shape for a, b in (sequences, filled)):
        raise ValueError(
            f"{owner}: item_ragged has {len(item_ragged)} sequences of {filled[0].shape[0]} places "
            f"together, but seller_ragged has {len(seller_ragged)} of {filled[1].shape[0]}, "
            "expected as many"
        )
    return _sums(filled[0] & filled[1], sequences[0]).float()


def _filled_places(owner: str, given: object) -> Tensor:
    """Return which places of a ragged tensor have a value, bool [places]."""
    if not isinstance(given, RaggedTensor):
        raise TypeError(f"{owner} is {described(given)}, expected a RaggedTensor")
    values, offsets = given.values(), [as_int64(of) for of in given.offsets()]
    if values.dim() != 1 or len(offsets) not in (2, 3):
        raise ValueError(
            f"{owner} has {given.dim} dimensions, expected 3, or 4 for strings of bytes"
        )
    there = values != 0
    if len(offsets) == 3:
        if values.dtype not in (torch.int8, torch.uint8):
            raise TypeError(f"{owner} has 4 dimensions of {values.dtype}, expected int8 or uint8")
        lengths = offsets[2].diff()
        there = (lengths > 1) | ((lengths == 1) & (_sums(values != ord("0"), offsets[2]) > 0))
    return _sums(there, offsets[1]) > 0


def _sums(flags: Tensor, offsets: Tensor) -> Tensor:
    """Count the True values of each row, int64 [rows]."""
    ends = flags.cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])[offsets].diff()


__all__ = [
    "compute_real_length",
    "dense_to_ragged",
    "feature_cross_ragged",
    "fused_ragged_cutoff_2D",
    "fused_ragged_cutoff_3D",
    "ragged_tile",
    "ragged_to_dense",
    "ragged_to_sparse",
    "tiled",
]
