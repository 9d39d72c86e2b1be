"""Ops that pool rows of any tensor, and their gradients."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from op_cases.groups import Case, OpArguments, pooled_kinds
from torch_dynemb.ops.columns import Pooling


def no_positions(bags: int) -> tuple[Tensor, Tensor]:
    """Positions and offsets of empty bags."""
    return torch.empty(0, dtype=torch.int64), torch.zeros(bags + 1, dtype=torch.int64)


def some_rows(rows: int, dim: int) -> Tensor:
    return torch.linspace(-1, 1, rows * dim).reshape(rows, dim)


def bag_weights(kind: str, count: int) -> Tensor | None:
    if kind == "plain":
        return None
    return torch.linspace(-0.5, 1.5, count).requires_grad_(kind == "learned")


def some_bags() -> tuple[Tensor, Tensor]:
    """Positions and offsets of two features."""
    return torch.tensor([2, 0, 2, 1, 1, 2, 0]), torch.tensor([0, 2, 2, 5, 6, 6, 7])


def plain_bag_arguments(kind: str, pooling: Pooling) -> OpArguments:
    positions, offsets = some_bags()
    rows = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_(kind == "learned")
    return rows, positions, offsets, 2, bag_weights(kind, 7), int(pooling)


def plain_bag_grad_arguments(kind: str, pooling: Pooling) -> OpArguments:
    positions, offsets = some_bags()
    grad = torch.linspace(-1, 1, 24).reshape(3, 8)
    return grad, positions, offsets, 2, 4, bag_weights(kind, 7), int(pooling)


def plain_weight_grad_arguments(pooling: Pooling) -> OpArguments:
    positions, offsets = some_bags()
    bags = (positions, offsets, bag_weights("weighted", 7), 2)
    return some_rows(3, 8), some_rows(3, 4), *bags, int(pooling)


def tile_arguments(kind: str) -> OpArguments:
    rows, positions, offsets, _, weights, _ = plain_bag_arguments(kind, Pooling.SUM)
    return rows, positions, offsets, weights, [2, 3], [0, 1]


def tile_grad_arguments(kind: str) -> OpArguments:
    _, positions, offsets, weights, lens, left = tile_arguments(kind)
    grads = [torch.linspace(-1, 1, 3 * n * 4).reshape(3, n * 4) for n in lens]
    return grads, positions, offsets, weights, 4, lens, left


def tile_weight_grad_arguments() -> OpArguments:
    rows, positions, offsets, _, lens, left = tile_arguments("plain")
    grads = tile_grad_arguments("plain")[0]
    return grads, rows, positions, offsets, lens, left


CASES: dict[str, dict[str, Case]] = {
    "pool_rows": {
        **{
            f"{kind} {pooling.name}": partial(plain_bag_arguments, kind, pooling)
            for kind in ("plain", "weighted", "learned")
            for pooling in (Pooling.SUM, Pooling.MEAN)
        },
        "many rows": lambda: (
            some_rows(3, 40),
            torch.arange(300) % 3,
            torch.tensor([0, 150, 300]),
            2,
            torch.linspace(-1, 1, 300),
            1,
        ),
        "odd": lambda: (
            some_rows(3, 5),
            torch.tensor([1, 2]),
            torch.tensor([0, 1, 2]),
            1,
            None,
            0,
        ),
        "empty": lambda: (
            some_rows(3, 4),
            torch.tensor([]).long(),
            torch.tensor([0]),
            2,
            None,
            1,
        ),
    },
    "pool_rows_grad": {
        **{
            f"{kind} {pooling.name}": partial(plain_bag_grad_arguments, kind, pooling)
            for kind, pooling in pooled_kinds()
        },
        "no rows": lambda: (some_rows(2, 4), *no_positions(2), 1, 0, None, 0),
        "many positions": lambda: (
            some_rows(2, 40),
            torch.arange(300) % 2,
            torch.tensor([0, 150, 300]),
            1,
            3,
            None,
            0,
        ),
        "empty": lambda: (
            some_rows(0, 8),
            torch.tensor([]).long(),
            torch.tensor([0]),
            2,
            3,
            None,
            1,
        ),
    },
    "pool_rows_weight_grad": {
        pooling.name: partial(plain_weight_grad_arguments, pooling)
        for pooling in (Pooling.SUM, Pooling.MEAN)
    },
    "ragged_tile": {
        "weighted": partial(tile_arguments, "weighted"),
        "plain": partial(tile_arguments, "plain"),
        "learned": partial(tile_arguments, "learned"),
        "empty": lambda: (
            some_rows(3, 4),
            torch.tensor([]).long(),
            torch.tensor([0]),
            None,
            [1, 2],
            [0, 1],
        ),
    },
    "ragged_tile_grad": {
        **{kind: partial(tile_grad_arguments, kind) for kind in ("weighted", "plain")},
        "no rows": lambda: ([some_rows(2, 4)], *no_positions(2), None, 0, [2], [0]),
    },
    "ragged_tile_weight_grad": {"": tile_weight_grad_arguments},
}
