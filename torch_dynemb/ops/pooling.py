"""Bags of rows of a plain tensor, such as rows received from other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.autograd import (
    Tensors,
    below_autograd,
    differentiable,
    needs_grad,
    register_autograd_kernel,
)
from torch_dynemb.ops.columns import Pooling


@raises_typed_errors
def pool_rows(
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    *,
    features: int,
    weights: Tensor | None = None,
    pooling: Pooling = Pooling.SUM,
) -> Tensor:
    """Sum or average bags of rows, feature beside feature; differentiable in rows and weights.

    Sums, including those of row gradients, are in the order of positions, whatever the number of
    threads. With mean pooling the gradient of a weight is (row - mean) * gradient / sum of weights.

    Args:
        rows: float32 [U, dim].
        positions: int64 [N], rows of the bags, feature after feature.
        offsets: int64 [features * B + 1], where bags begin in ``positions``.
        features: number of features.
        weights: float32 [N], factors of the rows.
        pooling: SUM, or MEAN: divided by the sum of the weights, or by the number of rows.

    Returns:
        float32 [B, features * dim]; 0 for an empty bag, and for a mean if its weights sum to 0.

    Raises:
        RuntimeError: a dtype or shape does not match, positions are out of range, or offsets are
            not ascending from 0 to N.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
        >>> pool_rows(rows, torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3]), features=2)
        tensor([[11., 22., 10., 20.]])
    """
    pooled: Tensor = torch.ops.dynemb.pool_rows(
        rows, positions, offsets, features, weights, int(pooling)
    )
    return pooled


@raises_typed_errors
def ragged_tile(
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    *,
    features: int,
    tile_lens: Sequence[int],
    pad_left: Sequence[bool] | None = None,
    weights: Tensor | None = None,
) -> list[Tensor]:
    """Put the first rows of every bag side by side; differentiable in rows and weights.

    Args:
        rows: float32 [U, dim].
        positions: int64 [N], rows of the bags, feature after feature.
        offsets: int64 [features * B + 1], where bags begin in ``positions``.
        features: number of features.
        tile_lens: number of rows that each feature keeps of a bag.
        pad_left: for each feature, whether zeros precede the rows of a shorter bag; default: they
            follow.
        weights: float32 [N], factors of the rows.

    Returns:
        float32 [B, tile_len * dim] for each feature.

    Raises:
        ValueError: a tile_len is less than 1, or their number is not that of features.
        RuntimeError: a dtype or shape does not match, positions are out of range, or offsets are
            not ascending from 0 to N.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
        >>> offsets = torch.tensor([0, 1, 4])
        >>> ragged_tile(rows, torch.tensor([1, 0, 1, 1]), offsets, features=1, tile_lens=[2])
        [tensor([[10., 20.,  0.,  0.],
                [ 1.,  2., 10., 20.]])]
    """
    if len(tile_lens) != features:
        raise ValueError(
            f"ragged_tile: tile_lens has {len(tile_lens)} entries, expected one for each of "
            f"{features} features"
        )
    for feature, tile_len in enumerate(tile_lens):
        if tile_len < 1:
            raise ValueError(
                f"ragged_tile: tile_lens[{feature}] is {tile_len}, expected at least 1"
            )
    left = [0] * features if pad_left is None else [int(flag) for flag in pad_left]
    tiles: list[Tensor] = torch.ops.dynemb.ragged_tile(
        rows, positions, offsets, weights, list(tile_lens), left
    )
    return tiles


@register_fake("pool_rows")
def _pool_rows_fake(
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    features: int,
    weights: Tensor | None,
    pooling: int,
) -> Tensor:
    return rows.new_empty(((offsets.shape[0] - 1) // features, features * rows.shape[1]))


@register_fake("pool_rows_grad")
def _pool_rows_grad_fake(
    grad: Tensor,
    positions: Tensor,
    offsets: Tensor,
    features: int,
    rows: int,
    weights: Tensor | None,
    pooling: int,
) -> Tensor:
    return grad.new_empty((rows, grad.shape[1] // features))


@register_fake("pool_rows_weight_grad")
def _pool_rows_weight_grad_fake(
    grad: Tensor,
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    weights: Tensor,
    features: int,
    pooling: int,
) -> Tensor:
    return torch.empty_like(weights)


@register_fake("ragged_tile")
def _ragged_tile_fake(
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tile_lens: Sequence[int],
    pad_left: Sequence[int],
) -> list[Tensor]:
    batch = (offsets.shape[0] - 1) // len(tile_lens)
    return [rows.new_empty((batch, tile_len * rows.shape[1])) for tile_len in tile_lens]


@register_fake("ragged_tile_grad")
def _ragged_tile_grad_fake(
    grads: Sequence[Tensor],
    positions: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    rows: int,
    tile_lens: Sequence[int],
    pad_left: Sequence[int],
) -> Tensor:
    return grads[0].new_empty((rows, grads[0].shape[1] // tile_lens[0]))


@register_fake("ragged_tile_weight_grad")
def _ragged_tile_weight_grad_fake(
    grads: Sequence[Tensor],
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    tile_lens: Sequence[int],
    pad_left: Sequence[int],
) -> Tensor:
    return rows.new_empty(positions.shape)


def _pool_rows_autograd(
    keyset: Any,
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    features: int,
    weights: Tensor | None,
    pooling: int,
) -> Tensor:
    op = torch.ops.dynemb.pool_rows.default
    arguments = (rows, positions, offsets, features, weights, pooling)
    if not needs_grad(rows, weights):
        result: Tensor = below_autograd(op, keyset, arguments)
        return result
    rows_count = rows.shape[0]

    def backward(inputs: Tensors, _: Any, grads: Any, needed: Any) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * len(inputs)
        if grads[0] is None:
            return result
        rows, positions, offsets = inputs[:3]
        weights = inputs[3] if len(inputs) > 3 else None
        grad = grads[0].contiguous()
        if needed[0]:
            result[0] = torch.ops.dynemb.pool_rows_grad(
                grad, positions, offsets, features, rows_count, weights, pooling
            )
        if weights is not None and needed[3]:
            result[3] = torch.ops.dynemb.pool_rows_weight_grad(
                grad, rows, positions, offsets, weights, features, pooling
            )
        return result

    inputs = [rows, positions, offsets, *([] if weights is None else [weights])]
    call = lambda: (below_autograd(op, keyset, arguments),)  # noqa: E731
    return differentiable(call, backward, inputs)[0]


def _ragged_tile_autograd(
    keyset: Any,
    rows: Tensor,
    positions: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    tile_lens: list[int],
    pad_left: list[int],
) -> list[Tensor]:
    op = torch.ops.dynemb.ragged_tile.default
    arguments = (rows, positions, offsets, weights, tile_lens, pad_left)
    if not needs_grad(rows, weights):
        result: list[Tensor] = below_autograd(op, keyset, arguments)
        return result
    rows_count, dim = rows.shape
    batch = (offsets.shape[0] - 1) // len(tile_lens)

    def backward(inputs: Tensors, _: Any, grads: Any, needed: Any) -> list[Tensor | None]:
        rows, positions, offsets = inputs[:3]
        weights = inputs[3] if len(inputs) > 3 else None
        given = [
            rows.new_zeros((batch, tile_len * dim)) if grad is None else grad.contiguous()
            for grad, tile_len in zip(grads, tile_lens, strict=True)
        ]
        result: list[Tensor | None] = [None] * len(inputs)
        if needed[0]:
            result[0] = torch.ops.dynemb.ragged_tile_grad(
                given, positions, offsets, weights, rows_count, tile_lens, pad_left
            )
        if weights is not None and needed[3]:
            result[3] = torch.ops.dynemb.ragged_tile_weight_grad(
                given, rows, positions, offsets, tile_lens, pad_left
            )
        return result

    inputs = [rows, positions, offsets, *([] if weights is None else [weights])]
    call = lambda: tuple(below_autograd(op, keyset, arguments))  # noqa: E731
    return list(differentiable(call, backward, inputs))


register_autograd_kernel("pool_rows", _pool_rows_autograd)
register_autograd_kernel("ragged_tile", _ragged_tile_autograd)
