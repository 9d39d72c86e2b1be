"""Crosses of many pairs of features.

Lists have an entry per feature. Rows of a feature are values of any dtype of 1, 2, 4 or 8 bytes and
int64 offsets [rows + 1], which ascend from 0 to the number of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.ragged_lists import (
    Weights,
    check_weights_length,
    given_weights,
    of_any_size,
)


class CrossedRagged(NamedTuple):
    """Result of :func:`feature_cross_ragged`.

    Attributes:
        values: int64 [n], ids of pairs, per pair of features.
        offsets: int64 [rows + 1].
        weights: float32 [n], a weight per id.
    """

    values: list[Tensor]
    offsets: list[Tensor]
    weights: list[Tensor]


@raises_typed_errors
def feature_cross_ragged(
    x_values: Sequence[Tensor],
    x_offsets: Sequence[Tensor],
    y_values: Sequence[Tensor],
    y_offsets: Sequence[Tensor],
    *,
    x_weights: Weights = None,
    y_weights: Weights = None,
) -> CrossedRagged:
    """Cross two features: make an id of each pair of their ids, row by row.

    A row gives an id for every distinct x and every distinct y, both in order of first occurrence,
    x by x. It is RecIS's id: MurmurHash64A, with seed 0, of the 16 bytes of both in little-endian
    order (:func:`murmurhash64a`). Its weight is the product of the weights of x and y. If an id
    occurs several times in a row, its first weight counts.

    Args:
        x_values, y_values: int64 [N].
        x_offsets, y_offsets: int64 [rows + 1], of the same number of rows.
        x_weights, y_weights: float32 [N], or None for a feature without weights, which then are 1.

    Raises:
        ValueError: weights require grad, which has no formula here, or their number is not that of
            features.
        RuntimeError: a dtype or shape does not match, or offsets are not ascending from 0 to N.

    Example:
        >>> x, y, offsets = torch.tensor([7, 7, 8]), torch.tensor([1, 2, 3]), torch.tensor([0, 3])
        >>> crossed = feature_cross_ragged([x], [offsets], [y], [offsets])
        >>> crossed.offsets[0].tolist(), crossed.weights[0].tolist()
        ([0, 6], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    """
    op = "feature_cross_ragged"
    for name, weights in (("x_weights", x_weights), ("y_weights", y_weights)):
        check_weights_length(op, name, weights, len(x_values))
        for feature, weight in enumerate(weights or ()):
            if weight is not None and weight.requires_grad:
                raise ValueError(
                    f"{op}: {name}[{feature}] requires grad, expected weights without: detach them"
                )
    return CrossedRagged(
        *torch.ops.dynemb.feature_cross_ragged(
            list(x_values),
            list(x_offsets),
            list(y_values),
            list(y_offsets),
            *given_weights(x_weights),
            *given_weights(y_weights),
        )
    )


@register_fake("feature_cross_ragged")
def _cross_fake(
    x_values: Sequence[Tensor],
    x_offsets: Sequence[Tensor],
    y_values: Sequence[Tensor],
    y_offsets: Sequence[Tensor],
    x_weights: Sequence[Tensor],
    x_weighted: Sequence[int],
    y_weights: Sequence[Tensor],
    y_weighted: Sequence[int],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    values = of_any_size(x_values)
    weights = [value.new_empty(value.shape, dtype=torch.float32) for value in values]
    return values, [torch.empty_like(tensor) for tensor in x_offsets], weights
