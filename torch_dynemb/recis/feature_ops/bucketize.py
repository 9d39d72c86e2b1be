"""Op that puts numbers into buckets."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import described, number, tensor
from torch_dynemb.recis.arguments import entries
from torch_dynemb.recis.feature_ops.feature_op import FeatureOp
from torch_dynemb.recis.feature_ops.values import (
    INTEGERS,
    Value,
    check_dtype,
    flat_values,
    with_values,
)


class Bucketize(FeatureOp):
    """Number of boundaries that are at most the value, as int64; NaN gives the number of all.

    Args:
        boundary: numbers, or a tensor [n], ascending. For float32 values they are rounded to
            float32.

    Raises:
        TypeError: boundaries are not numbers.
        ValueError: boundaries do not ascend.
    """

    _DTYPES = (torch.float32, torch.float64, *INTEGERS)

    def __init__(self, boundary: Sequence[float] | Tensor) -> None:
        super().__init__()
        numbers = self._checked(boundary)
        if any(not a <= b for a, b in pairwise(numbers)):
            raise ValueError(f"Bucketize: boundary is {numbers}, expected ascending numbers")
        self._numbers = tuple(numbers)
        for dtype in self._DTYPES:
            self.register_buffer(self._buffer(dtype), self._bounds(dtype), persistent=False)

    @staticmethod
    def _checked(boundary: object) -> list[float]:
        owner = "Bucketize: boundary"
        if isinstance(boundary, Tensor):
            if tensor(owner, boundary).dim() != 1 or boundary.is_complex():
                raise TypeError(
                    f"{owner} is {described(boundary)}, expected a tensor [n] of numbers"
                )
            boundary = boundary.tolist()
        given = entries(owner, boundary, "numbers or a tensor [n]")
        # an int keeps all its digits
        return [
            bound if type(bound) is int else number(f"{owner}[{i}]", bound)
            for i, bound in enumerate(given)
        ]

    @staticmethod
    def _buffer(dtype: torch.dtype) -> str:
        return f"boundary_{str(dtype).removeprefix('torch.')}"

    def _bounds(self, dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point:
            return torch.tensor(self._numbers, dtype=dtype, device="cpu")
        # for integers a boundary is rounded up; some boundaries are beyond the range of the dtype
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        bounds = [least if b < least else math.ceil(b) for b in self._numbers if b <= most]
        return torch.tensor([b for b in bounds if b <= most], dtype=dtype, device="cpu")

    def config(self) -> Hashable:
        return self._numbers

    def check(self, owner: str, value: Any) -> None:
        check_dtype(f"{owner}: Bucketize", value, self._DTYPES)

    @classmethod
    def run(cls, ops_: Sequence[Bucketize], inputs: Sequence[Value]) -> list[Value]:
        values = [flat_values(value) for value in inputs]
        bounds = [
            getattr(op, cls._buffer(value.dtype)).to(value.device)
            for op, value in zip(ops_, values, strict=True)
        ]
        results = ops.bucketize(values, bounds)
        return [with_values(v, result) for v, result in zip(inputs, results, strict=True)]


__all__ = ["Bucketize"]
