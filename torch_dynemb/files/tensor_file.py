"""Files of tensors in the safetensors format, written and read piece by piece.

A file has three parts, and the safetensors library reads it, too:

1. length of the header: 8 bytes, little endian;
2. header: JSON, padded with blanks to a multiple of 4,096 bytes (with the length), so that values
   are aligned;
3. values of one tensor after another.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.files.bounded_json import parsed

_ALIGNMENT = 4096
_MOST_HEADER_BYTES = 1 << 28
# https://huggingface.co/docs/safetensors/index: the names of dtypes
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# errors from parsing JSON with unexpected content
_MALFORMED = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError


class StoredTensor(NamedTuple):
    """Place of a tensor in a file.

    Attributes:
        dtype, shape: of the tensor.
        begin: offset of its first byte.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def bytes(self) -> int:
        """Number of bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Number of bytes for one index of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class TensorShape(NamedTuple):
    """Name, dtype and shape of a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Number of bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize


def header_of(tensors: Sequence[TensorShape], alignment: int = _ALIGNMENT) -> bytes:
    """Return the header of a file with tensors in this order.

    Args:
        tensors: tensors of the file.
        alignment: alignment of the first tensor, a power of two, at least 8.

    Raises:
        TypeError: the format lacks a dtype.
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
    """Return the tensors that a header describes, by name.

    Args:
        text: the JSON.
        data_begin: offset of the first byte after the header.
        file_bytes: size of the whole file.

    Raises:
        ValueError: it is not such a header, or does not fit the file.
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
    """Return the length of a header from the first 8 bytes of its file.

    Raises:
        ValueError: no header has this length.
    """
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= _MOST_HEADER_BYTES:
        raise ValueError(f"it begins with {first[:8].hex() or 'nothing'}, not with a header")
    return length


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as uint8 [bytes].

    A dimension of size 1 may have any stride, for which ``Tensor.view(torch.uint8)`` fails: a
    tensor of one element may be contiguous with a stride of 0.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def rows_as_bytes(tensor: Tensor) -> Tensor:
    """View rows as uint8 [n, bytes of a row]; strided ones are copied.

    Args:
        tensor: [n, ...].
    """
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    return as_bytes(tensor.contiguous()).view(tensor.shape[0], row_bytes)


def raw(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, valid while the tensor lives."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "StoredTensor",
    "TensorShape",
    "as_bytes",
    "header_bytes",
    "header_of",
    "raw",
    "rows_as_bytes",
    "sections_of",
]
