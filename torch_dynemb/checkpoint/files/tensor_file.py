"""Files of tensors in the safetensors format, written and read piece by piece.

A file is the length of its header (8 bytes, little endian), the header (JSON, padded with blanks to
4,096 bytes or a multiple, so that the values after it are aligned), then the values of one tensor
after another. The library of that name reads such files, but writes and reads whole tensors only.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.checkpoint.entries import DTYPE_NAMES, DTYPES
from torch_dynemb.checkpoint.files.bounded_json import parsed

_ALIGNMENT = 4096
_MOST_HEADER_BYTES = 1 << 28
# what reading of JSON raises that is not as expected
_MALFORMED = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError


class StoredTensor(NamedTuple):
    """Where the values of a tensor lie in a file.

    Attributes:
        dtype, shape: of the tensor.
        begin: the first byte.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def bytes(self) -> int:
        """Of all values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of the values of one index of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class TensorShape(NamedTuple):
    """A tensor that a file will have."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of all values."""
        return math.prod(self.shape) * self.dtype.itemsize


def header_of(tensors: Sequence[TensorShape], alignment: int = _ALIGNMENT) -> bytes:
    """What a file begins with, whose tensors follow in this order.

    Args:
        tensors: of the file.
        alignment: a power of two, at least 8, of which the first tensor begins at a multiple.

    Raises:
        TypeError: a dtype that the format does not have.
    """
    entries: dict[str, object] = {}
    begin = 0
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"checkpoint: {tensor.name!r} has dtype {tensor.dtype}, expected one of "
                f"{sorted(map(str, DTYPE_NAMES))}"
            )
        end = begin + tensor.bytes
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def sections_of(text: bytes, data_begin: int, file_bytes: int) -> dict[str, StoredTensor]:
    """The tensors that a header describes, by name.

    Args:
        text: the JSON.
        data_begin: the first byte after the header.
        file_bytes: of the whole file.

    Raises:
        ValueError: it is no such header, or does not fit the file.
    """
    result = {}
    try:
        entries = parsed(text)
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            dtype = DTYPES[entry["dtype"]]
            shape = tuple(int(size) for size in entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
            result[name] = StoredTensor(dtype, shape, data_begin + begin)
            possible = min(shape, default=0) >= 0 and math.prod(max(1, n) for n in shape) < 1 << 62
            if not possible or begin < 0 or end - begin != result[name].bytes:
                raise ValueError(f"{name!r} of shape {shape} would have bytes {begin} to {end}")
            if data_begin + end > file_bytes:
                raise ValueError(f"{name!r} would end at byte {data_begin + end} of {file_bytes}")
    except _MALFORMED as error:
        raise ValueError(f"its header cannot be read: {error!r}") from error
    return result


def header_bytes(first: bytes) -> int:
    """The length of a header from the first 8 bytes of its file.

    Raises:
        ValueError: it cannot be the length of one.
    """
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= _MOST_HEADER_BYTES:
        raise ValueError(f"it begins with {first[:8].hex() or 'nothing'}, not with a header")
    return length


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 [bytes]."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    # the stride of a dimension of size 1 may be any, and then no view is taken of it
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def raw(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU as bytes, while the tensor lives."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


__all__ = [
    "StoredTensor",
    "TensorShape",
    "as_bytes",
    "header_bytes",
    "header_of",
    "raw",
    "sections_of",
]
