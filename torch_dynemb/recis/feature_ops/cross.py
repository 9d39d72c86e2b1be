"""Op that crosses two features."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.recis.feature_ops.feature_op import FeatureOp
from torch_dynemb.recis.feature_ops.values import INTEGERS, Value, check_dtype, flat_values
from torch_dynemb.recis.ragged.offsets import as_int64
from torch_dynemb.recis.ragged.tensor import RaggedTensor


class FeatureCross(FeatureOp):
    """Ids of all pairs of the distinct ids of two features, row by row.

    The input is the list of two that :class:`SelectFields` returns: RaggedTensors, or dense tensors
    [rows, L], of ids. Ids of pairs are RecIS's. A pair's weight is the product of its ids' weights.
    If an id occurs several times in a row, its first weight counts
    (:func:`torch_dynemb.ops.feature_cross_ragged`).
    """

    def config(self) -> Hashable:
        return ()

    def check(self, owner: str, value: Any) -> None:
        owner = f"{owner}: FeatureCross"
        if not isinstance(value, list) or len(value) != 2:
            what = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
            raise TypeError(f"{owner} got {what}, expected a list of two: give it SelectFields")
        for field in value:
            check_dtype(owner, field, INTEGERS)
            if isinstance(field, Tensor) and field.dim() != 2:
                raise ValueError(
                    f"{owner} got a tensor of shape {tuple(field.shape)}, expected 2 dimensions"
                )
        rows = [self._rows(field)[1].shape[0] - 1 for field in value]
        if rows[0] != rows[1]:
            raise ValueError(f"{owner} got {rows[0]} and {rows[1]} rows, expected as many")

    @staticmethod
    def _rows(field: Value) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Return ids, innermost offsets, weights, and the other offsets."""
        if isinstance(field, RaggedTensor):
            *outer, inner = field.offsets()
            return flat_values(field).to(torch.int64), as_int64(inner), field.weight(), outer
        offsets = torch.arange(field.shape[0] + 1, device=field.device) * field.shape[1]
        return field.to(torch.int64).flatten(), offsets, None, []

    @classmethod
    def run(cls, ops_: Sequence[FeatureCross], inputs: Sequence[list[Value]]) -> list[RaggedTensor]:
        x = [cls._rows(pair[0]) for pair in inputs]
        y = [cls._rows(pair[1]) for pair in inputs]
        crossed = ops.feature_cross_ragged(
            [part[0] for part in x],
            [part[1] for part in x],
            [part[0] for part in y],
            [part[1] for part in y],
            x_weights=[part[2] for part in x],
            y_weights=[part[2] for part in y],
        )
        return [
            RaggedTensor._of_parts(values, [*part[3], offsets], weights)
            for part, values, offsets, weights in zip(x, *crossed, strict=True)
        ]


__all__ = ["FeatureCross"]
