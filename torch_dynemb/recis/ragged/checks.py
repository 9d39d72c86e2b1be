"""Checks of the parts of ragged tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_INDEX_DTYPES = (torch.int64, torch.int32)


def check_ragged(
    values: Tensor,
    offsets: Sequence[Tensor],
    weight: Tensor | None,
    dense_shape: Sequence[int] | None,
) -> None:
    """Check arguments of :class:`RaggedTensor`; compiled code does not check values.

    Args:
        values, offsets, weight, dense_shape: as RaggedTensor takes them.

    Raises:
        TypeError, ValueError: the parts do not match.
    """
    if not offsets:
        raise ValueError("RaggedTensor: offsets is empty, expected one per ragged dimension")
    if not isinstance(values, Tensor):
        raise TypeError(
            f"RaggedTensor: values is a {type(values).__name__}, expected a Tensor{remedy(values)}"
        )
    for name, given in (("values", values), ("weight", weight)):
        if isinstance(given, Tensor) and given.layout != torch.strided:
            raise TypeError(
                f"RaggedTensor: {name} is a tensor of layout {given.layout}, expected a dense one"
            )
    if values.dim() == 0:
        raise ValueError("RaggedTensor: values has 0 dimensions, expected at least 1")
    for d, of_dimension in enumerate(offsets):
        _check_kind(f"RaggedTensor: offsets[{d}]", of_dimension, values.device)
    if weight is not None:
        _check_weight(weight, values)
    if dense_shape is not None and len(dense_shape) != len(offsets) + 1:
        raise ValueError(
            f"RaggedTensor: dense_shape is {tuple(dense_shape)}, expected {len(offsets) + 1} sizes"
        )
    if torch.compiler.is_compiling():
        return
    for d, of_dimension in enumerate(offsets):
        name = f"RaggedTensor: offsets[{d}]"
        if d + 1 < len(offsets):
            _check_numbers(name, of_dimension, offsets[d + 1].shape[0] - 1, "rows")
        else:
            _check_numbers(name, of_dimension, values.shape[0], "values")


def remedy(value: object) -> str:
    """Return the remedy for a NumPy array in place of a tensor, else nothing."""
    array = hasattr(value, "__array_interface__")
    return ": torch.from_numpy converts an array" if array else ""


def _check_kind(name: str, offsets: Tensor, device: torch.device) -> None:
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{name} is a {type(offsets).__name__}, expected a Tensor{remedy(offsets)}")
    if offsets.layout != torch.strided:
        raise TypeError(f"{name} is a tensor of layout {offsets.layout}, expected a dense one")
    if offsets.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name} has dtype {offsets.dtype}, expected int64 or int32")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(f"{name} has shape {tuple(offsets.shape)}, expected (rows + 1,)")
    if offsets.device != device:
        raise ValueError(f"{name} is on {offsets.device}, but values on {device}")


def _check_weight(weight: Tensor, values: Tensor) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"RaggedTensor: weight is a {type(weight).__name__}, expected a Tensor{remedy(weight)}"
        )
    if not weight.is_floating_point():
        raise TypeError(f"RaggedTensor: weight has dtype {weight.dtype}, expected floats")
    if weight.shape != values.shape[:1]:
        raise ValueError(
            f"RaggedTensor: weight has shape {tuple(weight.shape)}, expected one for each "
            f"of the {values.shape[0]} values"
        )
    if weight.device != values.device:
        raise ValueError(
            f"RaggedTensor: weight is on {weight.device}, but values on {values.device}"
        )


def _check_numbers(name: str, offsets: Tensor, end: int, what: str) -> None:
    if offsets.device.type != "cpu":
        torch._assert_async(
            (offsets[0] == 0) & (offsets[-1] == end) & (offsets.diff() >= 0).all(),
            f"{name} must ascend from 0 to the number of {what}",
        )
        return
    if int(offsets[0]) != 0:
        raise ValueError(f"{name} begins with {int(offsets[0])}, expected 0")
    if int(offsets[-1]) != end:
        raise ValueError(
            f"{name} ends with {int(offsets[-1])}, expected {end}, the number of {what}"
        )
    falls = offsets[1:] < offsets[:-1]
    if bool(falls.any()):
        at = int(falls.nonzero()[0])
        raise ValueError(
            f"{name} decreases from {int(offsets[at])} to {int(offsets[at + 1])}, expected it to "
            "ascend"
        )


__all__ = ["check_ragged"]
