"""Op that limits the length of sequences."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import flag, integer
from torch_dynemb.errors import DynembError
from torch_dynemb.recis.feature_ops.feature_op import FeatureOp
from torch_dynemb.recis.feature_ops.values import (
    Value,
    check_dtype,
    check_optional_dtype,
    check_value,
    flat_values,
)
from torch_dynemb.recis.ragged.offsets import as_int64
from torch_dynemb.recis.ragged.tensor import RaggedTensor


class SequenceLengthError(DynembError, ValueError, AssertionError):
    """A row is longer than ``seq_len``; RecIS raises AssertionError."""


class SequenceTruncate(FeatureOp):
    """At most ``seq_len`` elements in every row: ids, or (``n_dims=3``) lists of ids.

    Weights are cut with the values. With ``n_dims=3`` every row of a RaggedTensor gets exactly
    ``seq_len`` lists: shorter rows are filled with empty lists at the right. A dense tensor is cut
    in its second dimension.

    Args:
        seq_len: maximum length.
        check_length: raise :class:`SequenceLengthError` for a longer row; it waits for a GPU.
        truncate: False: only check.
        truncate_side: side at which longer rows are cut, "left" or "right".
        n_dims: 2 or 3.
        dtype: required dtype of the values; default: any.

    Raises:
        TypeError, ValueError: an argument has another value.
    """

    def __init__(
        self,
        seq_len: int = 64,
        check_length: bool = True,
        truncate: bool = True,
        truncate_side: str = "left",
        n_dims: int = 2,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        seq_len = integer("SequenceTruncate: seq_len", seq_len, least=1)
        flag("SequenceTruncate: check_length", check_length)
        flag("SequenceTruncate: truncate", truncate)
        if not isinstance(truncate_side, str) or truncate_side not in ("left", "right"):
            raise ValueError(
                f"SequenceTruncate: truncate_side is {truncate_side!r}, expected 'left' or 'right'"
            )
        n_dims = integer("SequenceTruncate: n_dims", n_dims, least=2, most=3)
        check_optional_dtype("SequenceTruncate", dtype)
        self.seq_len, self.check_length, self.truncate = seq_len, check_length, truncate
        self.truncate_side, self.n_dims, self.dtype = truncate_side, n_dims, dtype

    def config(self) -> Hashable:
        sides = (self.truncate, self.truncate_side)
        return self.seq_len, self.check_length, *sides, self.n_dims, self.dtype

    def check(self, owner: str, value: Any) -> None:
        owner = f"{owner}: SequenceTruncate"
        check_value(owner, value)
        if self.dtype is not None:
            check_dtype(owner, value, (self.dtype,))
        ragged = isinstance(value, RaggedTensor)
        dims = len(value.offsets()) + 1 if ragged else value.dim()
        if self.check_length and dims > 1:
            longest = value.get_shape(1) if ragged else value.shape[1]
            if longest > self.seq_len:
                raise SequenceLengthError(
                    f"{owner} got a row of {longest} elements, expected at most seq_len, "
                    f"{self.seq_len}: check_length=False cuts it silently"
                )
        if (ragged and dims != self.n_dims) or dims < self.n_dims:
            raise ValueError(f"{owner} got {dims} dimensions, expected n_dims, {self.n_dims}")

    def _cut_dense(self, value: Tensor) -> Tensor:
        if self.truncate_side == "left":
            return value[:, -self.seq_len :]
        return value[:, : self.seq_len]

    @classmethod
    def run(cls, ops_: Sequence[SequenceTruncate], inputs: Sequence[Value]) -> list[Value]:
        results = list(inputs)
        ragged: dict[int, list[int]] = {}
        for i, (op, value) in enumerate(zip(ops_, inputs, strict=True)):
            if not op.truncate:
                continue
            if isinstance(value, Tensor):
                results[i] = op._cut_dense(value)
            else:
                ragged.setdefault(op.n_dims, []).append(i)
        for n_dims, numbers in ragged.items():
            cut = cls._cut_2d if n_dims == 2 else cls._cut_3d
            given = [results[i] for i in numbers]
            for i, result in zip(numbers, cut([ops_[i] for i in numbers], given), strict=True):
                results[i] = result
        return results

    @staticmethod
    def _cut_2d(ops_: Sequence[SequenceTruncate], given: Sequence[Any]) -> list[RaggedTensor]:
        cut = ops.ragged_cutoff_2d(
            [flat_values(value) for value in given],
            [as_int64(value.offsets()[0]) for value in given],
            [op.seq_len for op in ops_],
            weights=[value.weight() for value in given],
            drop_left=[op.truncate_side == "left" for op in ops_],
        )
        return [
            RaggedTensor._of_parts(values, [offsets], weights)
            for values, offsets, weights in zip(*cut, strict=True)
        ]

    @staticmethod
    def _cut_3d(ops_: Sequence[SequenceTruncate], given: Sequence[Any]) -> list[RaggedTensor]:
        cut = ops.ragged_cutoff_3d(
            [flat_values(value) for value in given],
            [as_int64(value.offsets()[0]) for value in given],
            [as_int64(value.offsets()[1]) for value in given],
            [op.seq_len for op in ops_],
            weights=[value.weight() for value in given],
            drop_left=[op.truncate_side == "left" for op in ops_],
        )
        return [
            RaggedTensor._of_parts(values, [outer, inner], weights)
            for values, outer, inner, weights in zip(*cut, strict=True)
        ]


__all__ = ["SequenceLengthError", "SequenceTruncate"]
