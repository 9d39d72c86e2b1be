"""Rows of a table as values of Redis hashes: a head of 8 bytes, then the numbers.

::

    | format version 2 | dtype 2 | columns 4 | numbers, little endian |

The number after a field is its size in bytes. dtype is 1 for float32, 2 for float16 and 3 for
bfloat16.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.errors import DamagedFileError, UnsupportedFormatError
from torch_dynemb.files.tensor_file import raw, rows_as_bytes

VERSION = 1
DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_HEAD = struct.Struct("<HHI")


class ShardOfRows(NamedTuple):
    """Fields of one hash.

    Attributes:
        shard: number of the hash.
        items: id, value, id, value, and so on.
    """

    shard: int
    items: list[bytes]


def shard_of(ids: Tensor, shards: int) -> Tensor:
    """Return the shard of each id: its lowest bits, also of a negative one.

    Args:
        ids: int64 [n].
        shards: number of shards, a power of two.

    Returns:
        int64 [n].
    """
    return ids & (shards - 1)


def values_of(rows: Tensor) -> list[bytes]:
    """Return a value for each row.

    Args:
        rows: [n, columns] of a dtype in ``DTYPES``.
    """
    columns = rows.shape[1]
    head = torch.frombuffer(
        bytearray(_HEAD.pack(VERSION, DTYPES[rows.dtype], columns)), dtype=torch.uint8
    )
    size = columns * rows.element_size()
    numbers = rows_as_bytes(rows)
    whole = torch.cat([head.expand(len(rows), -1), numbers], dim=1)
    text = bytes(raw(whole))
    size += _HEAD.size
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


def rows_of_values(owner: str, values: Sequence[bytes], columns: int) -> Tensor:
    """Return the rows of some values.

    Args:
        owner: prefix of errors.
        values: of one table, n of them.
        columns: of a row.

    Returns:
        float32 [n, columns].

    Raises:
        UnsupportedFormatError: they have another format version.
        DamagedFileError: a value is not a row of these columns.
    """
    if not values:
        return torch.empty(0, columns, dtype=torch.float32, device="cpu")
    version, number, _ = _HEAD.unpack_from(values[0].ljust(_HEAD.size, b"\0"))
    dtypes = [dtype for dtype, of in DTYPES.items() if of == number]
    if version != VERSION or not dtypes:
        raise UnsupportedFormatError(
            f"{owner}: a row has format version {version} and dtype {number}, but this library "
            f"reads version {VERSION} and dtypes {sorted(DTYPES.values())}"
        )
    head = _HEAD.pack(version, number, columns)
    size = len(head) + columns * dtypes[0].itemsize
    is_whole = set(map(len, values)) == {size}
    if is_whole:
        text = torch.frombuffer(bytearray(b"".join(values)), dtype=torch.uint8)
        heads, numbers = text.view(len(values), size).split([len(head), size - len(head)], 1)
        is_whole = bool((heads == torch.frombuffer(bytearray(head), dtype=torch.uint8)).all())
    if not is_whole:
        raise DamagedFileError(
            f"{owner}: a value is not a row of {columns} columns of {dtypes[0]}, {size} bytes: "
            "load a checkpoint again"
        )
    rows: Tensor = numbers.contiguous().view(dtypes[0])
    return rows.float()


def values_by_shard(ids: Tensor, shards: int, rows: Tensor | None = None) -> Iterator[ShardOfRows]:
    """Iterate over the shards of some ids, with the fields to set or to delete.

    Args:
        ids: int64 [n].
        shards: number of shards, a power of two.
        rows: [n, columns]; None: the items are ids alone.
    """
    numbers, order = shard_of(ids, shards).sort(stable=True)
    names = [b"%d" % id for id in ids[order].tolist()]
    items = names
    if rows is not None:
        items = [b""] * (2 * len(names))
        items[0::2], items[1::2] = names, values_of(rows[order])
    each = 1 if rows is None else 2
    present, counts = numbers.unique_consecutive(return_counts=True)
    begin = 0
    for shard, count in zip(present.tolist(), counts.tolist(), strict=True):
        yield ShardOfRows(shard, items[begin : begin + each * count])
        begin += each * count


__all__ = [
    "DTYPES",
    "VERSION",
    "ShardOfRows",
    "rows_of_values",
    "shard_of",
    "values_by_shard",
    "values_of",
]
