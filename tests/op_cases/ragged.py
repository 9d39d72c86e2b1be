"""Ops on ragged values of many features."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from op_cases.groups import Case, OpArguments


def ragged_arguments(*, learned: bool = False) -> OpArguments:
    """Three features of different dtypes; the first and the last have weights.

    opcheck adds up results in the dtype of the first, which must therefore have a gradient.
    """
    values = [
        torch.linspace(0, 1, 6).requires_grad_() if learned else torch.arange(6) - 2**40,
        torch.tensor([True, False, True]),
        torch.linspace(-1, 1, 5).requires_grad_(learned),
    ]
    offsets = [
        torch.tensor([0, 3, 3, 6]),
        torch.tensor([0, 2, 3]),
        torch.tensor([0, 0, 4, 5]),
    ]
    weights = [torch.linspace(0, 1, 6).requires_grad_(learned), torch.linspace(1, 2, 5)]
    return values, offsets, weights, [0, 2]


def no_rows() -> OpArguments:
    return [torch.empty(0), torch.arange(2)], [torch.tensor([0]), torch.tensor([0, 0, 2])]


def nested_cut_arguments(*, learned: bool) -> OpArguments:
    values = [torch.arange(5), torch.linspace(0, 1, 4).half(), torch.linspace(-1, 1, 3)]
    if learned:
        values[0] = torch.linspace(0, 1, 5)
    outer = [torch.tensor([0, 3, 3, 4]), torch.tensor([0, 2]), torch.tensor([0, 1, 3])]
    inner = [torch.tensor([0, 2, 2, 3, 5]), torch.tensor([0, 1, 4]), torch.tensor([0, 1, 1, 3])]
    values[2].requires_grad_(learned)
    weights = [torch.linspace(0, 1, 5).requires_grad_(learned)]
    return values, outer, inner, weights, [0], [2, 1, 3], [1, 0, 0], [1, 0, 1]


def topk_arguments(*, learned: bool) -> OpArguments:
    values, offsets, weights, weighted = ragged_arguments(learned=learned)
    indices = [
        torch.tensor([[2, 0, -1], [0, 1, 2], [1, 1, 5]]),
        torch.tensor([[1], [0]]),
        torch.tensor([[0, 0], [3, 1], [-7, 0]]),
    ]
    return values, offsets, indices, weights, weighted


def nested_arguments(*, learned: bool = False) -> OpArguments:
    """Depths 1, 2 and 3."""
    values = [
        torch.linspace(-1, 1, 3).requires_grad_(learned),
        torch.arange(5).to(torch.int16),
        torch.arange(4).double().requires_grad_(learned),
    ]
    offsets = [
        torch.tensor([0, 2, 2, 3]),
        torch.tensor([0, 3, 4]),
        torch.tensor([0, 2, 2, 4, 5]),
        torch.tensor([0, 1, 3]),
        torch.tensor([0, 2, 2, 3]),
        torch.tensor([0, 1, 3, 4]),
    ]
    return values, offsets, [1, 2, 3], [2, 3, 2, 2, 2, 3]


def dense_arguments(*, learned: bool = False) -> list[Tensor]:
    numbers = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 2]])
    return [
        numbers.float() if learned else numbers,
        torch.tensor([[[1.0, -0.0], [0.0, 2.0]], [[0.0, 0.0], [3.0, 1.0]]]).requires_grad_(learned),
        torch.zeros(2, 0, 3).to(torch.uint8),
    ]


def cross_arguments(*, weighted: bool) -> OpArguments:
    x, y = torch.tensor([5, 5, 6, 7, 5]), torch.tensor([1, 1, 2, -3])
    weights = [torch.linspace(0, 1, 5)] if weighted else []
    y_weights = [torch.linspace(-1, 1, 4)] if weighted else []
    return (
        [x, torch.arange(2)],
        [torch.tensor([0, 3, 4, 5]), torch.tensor([0, 2])],
        [y, torch.tensor([9])],
        [torch.tensor([0, 2, 2, 4]), torch.tensor([0, 1])],
        weights,
        [0] if weighted else [],
        y_weights,
        [0] if weighted else [],
    )


CASES: dict[str, dict[str, Case]] = {
    "ragged_cutoff_2d": {
        "weighted": lambda: (*ragged_arguments(), [2, 1, 100], [1, 0, 0]),
        "learned": lambda: (*ragged_arguments(learned=True), [2, 1, 100], [1, 0, 0]),
        "empty": lambda: (*no_rows(), [], [], [0, 3], [0, 1]),
    },
    "ragged_cutoff_3d": {
        "weighted": partial(nested_cut_arguments, learned=False),
        "learned": partial(nested_cut_arguments, learned=True),
        "empty": lambda: (
            [torch.empty(0), torch.empty(0)],
            [torch.tensor([0]), torch.tensor([0, 0, 0])],
            [torch.tensor([0]), torch.tensor([0])],
            [],
            [],
            [2, 3],
            [0, 1],
            [1, 0],
        ),
    },
    "ragged_topk_index_cutoff": {
        "weighted": partial(topk_arguments, learned=False),
        "learned": partial(topk_arguments, learned=True),
        "no positions": lambda: (
            [torch.arange(3)],
            [torch.tensor([0, 1, 3])],
            [torch.empty(2, 0).long()],
            [],
            [],
        ),
    },
    "ragged_to_dense": {
        "": lambda: (*nested_arguments(), 7.0, 7),
        "learned": lambda: (*nested_arguments(learned=True), -0.5, 0),
        "one feature": lambda: (
            [torch.arange(4).bfloat16()],
            [torch.tensor([0, 0, 4])],
            [1],
            [5],
            float("inf"),
            0,
        ),
    },
    "ragged_indices": {"": nested_arguments},
    "dense_to_ragged": {
        "": lambda: (dense_arguments(), True, 0.0, 0),
        "learned": lambda: (dense_arguments(learned=True), True, 1.0, 1),
        "all": lambda: (dense_arguments(), False, 0.0, 0),
        "one feature": lambda: ([torch.tensor([[1.0, -0.0], [0.0, 0.0]]).half()], True, 0.0, 0),
    },
    "feature_cross_ragged": {
        "weighted": partial(cross_arguments, weighted=True),
        "plain": partial(cross_arguments, weighted=False),
        "long rows": lambda: (
            [torch.arange(60) % 23],
            [torch.tensor([0, 57, 60])],
            [torch.arange(50) % 7],
            [torch.tensor([0, 0, 50])],
            [],
            [],
            [torch.linspace(0, 1, 50)],
            [0],
        ),
    },
}
