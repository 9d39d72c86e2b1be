"""Inputs and outputs of ops: tensors, dense or ragged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, tensor
from torch_dynemb.recis.ragged.tensor import RaggedTensor

Value = Tensor | RaggedTensor
INTEGERS = (torch.int64, torch.int32)


def check_value(owner: str, value: Any) -> None:
    """Raise TypeError unless a value is a tensor, dense or ragged."""
    if not isinstance(value, (Tensor, RaggedTensor)):
        raise TypeError(f"{owner} got a {type(value).__name__}, expected a Tensor or RaggedTensor")
    if isinstance(value, Tensor):
        tensor(f"{owner}: the input", value)


def check_dtype(owner: str, value: Any, dtypes: Sequence[torch.dtype]) -> None:
    """Raise TypeError unless a value is a tensor, dense or ragged, of one of the dtypes."""
    check_value(owner, value)
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{owner} got values of {value.dtype}, expected one of {names}")


def check_optional_dtype(owner: str, dtype: object) -> None:
    """Raise TypeError unless the argument ``dtype`` of an op is a dtype or None."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{owner}: dtype is {described(dtype)}, expected a torch.dtype or None")


def flat_values(value: Value) -> Tensor:
    """Return all values, contiguous."""
    values = value.values() if isinstance(value, RaggedTensor) else value
    return values.contiguous()


def with_values(value: Value, values: Tensor) -> Value:
    """Return other values in the same rows, with the same weights."""
    if isinstance(value, Tensor):
        return values
    return value.with_values(values)


__all__ = [
    "INTEGERS",
    "Value",
    "check_dtype",
    "check_optional_dtype",
    "check_value",
    "flat_values",
    "with_values",
]
