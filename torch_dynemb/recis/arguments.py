"""Checks of RecIS's arguments, and their conversion for the ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer, tensor
from torch_dynemb.recis.ragged.offsets import as_int64

_INDEX_DTYPES = (torch.int64, torch.int32)


def entries(owner: str, values: object, expected: str) -> list[Any]:
    """Return the entries of a list or another iterable.

    Raises:
        TypeError: ``values`` is a tensor, a string, a dict, or not iterable.
    """
    if isinstance(values, str | bytes | Tensor | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{owner} is {described(values)}, expected {expected}")
    return list(values)


def tensors(owner: str, values: object) -> list[Tensor]:
    """Return the dense tensors of a list, made contiguous.

    Raises:
        TypeError: ``values`` is not a list, or an entry is not a dense tensor.
    """
    given = entries(owner, values, "a list of Tensors")
    return [tensor(f"{owner}[{i}]", value).contiguous() for i, value in enumerate(given)]


def index_tensor(owner: str, value: object) -> Tensor:
    """Return offsets or positions as contiguous int64.

    Raises:
        TypeError: ``value`` is not a dense tensor of int32 or int64.
    """
    given = tensor(owner, value)
    if given.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{owner} has dtype {given.dtype}, expected int64 or int32")
    return as_int64(given)


def index_tensors(owner: str, values: object) -> list[Tensor]:
    """Apply :func:`index_tensor` to each entry of a list.

    Raises:
        TypeError: ``values`` is not a list, or an entry is not a tensor of int32 or int64.
    """
    given = entries(owner, values, "a list of Tensors")
    return [index_tensor(f"{owner}[{i}]", value) for i, value in enumerate(given)]


def numbers(owner: str, values: object) -> list[int]:
    """Return integers as a list; a GPU tensor is copied to the host, which synchronizes.

    Raises:
        TypeError: ``values`` is neither a tensor [n] nor a list of ints.
        ValueError: a number is outside of int64.
    """
    given = _read_by_host(owner, values, "ints")
    return [integer(f"{owner}[{i}]", value) for i, value in enumerate(given)]


def bools(owner: str, values: object) -> list[bool]:
    """Return flags as a list; a GPU tensor is copied to the host, which synchronizes.

    Raises:
        TypeError: ``values`` is neither a tensor [n] nor a list of bools, or of 0 and 1.
    """
    given = _read_by_host(owner, values, "bools")
    for i, value in enumerate(given):
        if not isinstance(value, bool | int) or value not in (0, 1):
            raise TypeError(f"{owner}[{i}] is {described(value)}, expected True or False")
    return [bool(value) for value in given]


def _read_by_host(owner: str, values: object, kind: str) -> list[Any]:
    if not isinstance(values, Tensor):
        return entries(owner, values, f"a tensor [n] or a list of {kind}")
    given = tensor(owner, values)
    if given.dim() != 1 or given.is_floating_point() or given.is_complex():
        raise TypeError(f"{owner} is {described(given)}, expected a tensor [n] of {kind}")
    result: list[Any] = given.tolist()
    return result


__all__ = ["bools", "entries", "index_tensor", "index_tensors", "numbers", "tensors"]
