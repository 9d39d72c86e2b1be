"""Sums of bags of rows that lie in a plain tensor, such as those that other ranks have sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_dynemb._library import register_fake


def pool_rows(rows: Tensor, positions: Tensor, offsets: Tensor, *, features: int) -> Tensor:
    """Sums of bags of rows, feature beside feature; differentiable in ``rows``.

    Sums, also those of gradients, are in the order of positions, whatever the number of threads.

    Args:
        rows: float32 [U, dim].
        positions: int64 [N], rows of the bags, feature after feature.
        offsets: int64 [features * B + 1], where bags begin in ``positions``.
        features: number of features.

    Returns:
        float32 [B, features * dim]; 0 for an empty bag.

    Raises:
        RuntimeError: a dtype or shape does not match, positions are none of rows, or offsets are
            not ascending from 0 to N.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
        >>> pool_rows(rows, torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3]), features=2)
        tensor([[11., 22., 10., 20.]])
    """
    pooled: Tensor = torch.ops.dynemb.pool_rows(rows, positions, offsets, features)
    return pooled


@register_fake("pool_rows")
def _pool_rows_fake(rows: Tensor, positions: Tensor, offsets: Tensor, features: int) -> Tensor:
    return rows.new_empty(((offsets.shape[0] - 1) // features, features * rows.shape[1]))


@register_fake("pool_rows_grad")
def _pool_rows_grad_fake(
    grad: Tensor, positions: Tensor, offsets: Tensor, features: int, rows: int
) -> Tensor:
    return grad.new_empty((rows, grad.shape[1] // features))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    rows, positions, offsets, features = inputs
    ctx.save_for_backward(positions, offsets)
    ctx.features, ctx.rows = features, rows.shape[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    positions, offsets = ctx.saved_tensors
    of_rows = torch.ops.dynemb.pool_rows_grad(
        grad.contiguous(), positions, offsets, ctx.features, ctx.rows
    )
    return of_rows, None, None, None


torch.library.register_autograd("dynemb::pool_rows", _backward, setup_context=_save)


def _bags(positions: Tensor, offsets: Tensor, features: int) -> Tensor:
    """The bag of every position."""
    lengths = offsets.diff()
    bags = torch.arange(lengths.shape[0], device=offsets.device)
    return bags.repeat_interleave(lengths, output_size=positions.shape[0])


def torch_pool_rows(rows: Tensor, positions: Tensor, offsets: Tensor, features: int) -> Tensor:
    """:func:`pool_rows` by torch's ops: what runs on a GPU. Values are not checked there."""
    sums = torch.nn.functional.embedding_bag(
        positions, rows, offsets, mode="sum", include_last_offset=True
    )
    by_feature = sums.view(features, -1, rows.shape[1])
    return by_feature.transpose(0, 1).reshape(-1, features * rows.shape[1])


def torch_pool_rows_grad(
    grad: Tensor, positions: Tensor, offsets: Tensor, features: int, rows: int
) -> Tensor:
    """Its gradient."""
    dim = grad.shape[1] // features
    by_bag = grad.view(-1, features, dim).transpose(0, 1).reshape(-1, dim)
    of_positions = by_bag[_bags(positions, offsets, features)]
    return grad.new_zeros((rows, dim)).index_add_(0, positions, of_positions)


_cuda = torch.library.Library("dynemb", "IMPL")
_cuda.impl("pool_rows", torch_pool_rows, "CUDA")
_cuda.impl("pool_rows_grad", torch_pool_rows_grad, "CUDA")
