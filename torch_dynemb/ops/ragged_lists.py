"""Lists of tensors and offsets, shared by ops on ragged rows of many features."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dynemb.ops.autograd import Tensors

Weights = Sequence[Tensor | None] | None


def given_weights(weights: Weights) -> tuple[list[Tensor], list[int]]:
    """Return the given weights, and the features that they belong to."""
    numbered = [(f, w) for f, w in enumerate(weights or ()) if w is not None]
    return [w for _, w in numbered], [f for f, _ in numbered]


def all_weights(weights: list[Tensor], weighted: list[int], features: int) -> list[Tensor | None]:
    """Return an entry per feature, None where it has no weights."""
    result: list[Tensor | None] = [None] * features
    for feature, weight in zip(weighted, weights, strict=True):
        result[feature] = weight
    return result


def flags(given: Sequence[bool] | None, features: int) -> list[int]:
    """Return one flag per feature, in the form that ops take."""
    return [0] * features if given is None else [int(flag) for flag in given]


def check_weights_length(op: str, name: str, weights: Weights, features: int) -> None:
    """Raise ValueError unless there is an entry per feature."""
    if weights is not None and len(weights) != features:
        raise ValueError(
            f"{op}: {name} has {len(weights)} entries, expected one, or None, for each of "
            f"{features} features"
        )


def flat(nested: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the items of lists, list after list."""
    return [item for items in nested for item in items]


def begins(depths: Sequence[int]) -> list[int]:
    """Return where the offsets of each feature begin."""
    return [0, *accumulate(depths)]


def of_any_size(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make fake tensors with sizes that depend on values."""
    context = torch.library.get_ctx()
    return [tensor.new_empty((context.new_dynamic_size(),)) for tensor in tensors]


# The sizes of the gradients are unknown before the forward has run, so a compiled backward cannot
# have them: these formulas do not use them.
def gathered(grad: Tensor, places: Tensor) -> Tensor:
    """Return gradients at ``places``; 0 where these are -1."""
    return F.pad(grad, (0, 1))[places]


def split(outputs: Tensors, sizes: Sequence[int]) -> tuple[list[Tensor], ...]:
    """Split flat outputs into lists of these sizes."""
    return tuple(list(outputs[begin:end]) for begin, end in pairwise(begins(sizes)))


def offsets_among(fixed: Tensors, features: int, lists: int) -> list[list[Tensor]]:
    """Return the lists of offsets at the end of outputs without a gradient."""
    given = fixed[len(fixed) - lists * features :]
    return [list(given[k * features : (k + 1) * features]) for k in range(lists)]
