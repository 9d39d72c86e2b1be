"""Reads snapshots that OneFlow's OneEmbedding has written.

A folder has, for the ids of one rank, ``keys/key-<chunk>`` and ``values/value-<chunk>``, to which
every write appends; a chunk is 4 GiB of values. Values lie in blocks: as many as fit into one
sector of the disk, or one in as many sectors as it needs. A snapshot is the numbers of the rows
that counted when it was taken, uint64 each, in ``snapshots/<name>/index-<chunk>``, and ``LIST``
says which of these files there are. Sizes are texts in files named after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.oneembedding.snapshots import SNAPSHOTS

_INDEX = "index-"
_DIGITS = 12


class OneFlowTable(NamedTuple):
    """The folder of a rank.

    Attributes:
        folder: that has ``keys`` and ``values``.
        key_bytes, value_bytes: of one row.
        block_bytes: of the values that lie together, padding included.
        values_per_block: how many these are.
        values_per_chunk: rows of a file.
    """

    folder: Path
    key_bytes: int
    value_bytes: int
    block_bytes: int
    values_per_block: int
    values_per_chunk: int

    def chunks(self, owner: str, name: str) -> list[tuple[int, Path]]:
        """The chunks that a snapshot has rows of, and the file that says which.

        Args:
            owner: prefix of error messages.
            name: of the snapshot.

        Raises:
            FileNotFoundError: the snapshot does not exist.
            ValueError: its list names what is no index.
        """
        folder = self.folder / SNAPSHOTS / name
        listed = folder / "LIST"
        if not listed.is_file():
            raise FileNotFoundError(f"{owner}: {folder} is no snapshot: it has no file LIST")
        chunks = []
        for line in listed.read_text().splitlines():
            digits = line.removeprefix(_INDEX)
            if not line.startswith(_INDEX) or len(digits) != _DIGITS or not digits.isdecimal():
                raise ValueError(f"{owner}: {listed} has {line!r}, expected index-000000000000")
            chunks.append((int(digits), folder / line))
        return chunks

    def rows(
        self, owner: str, name: str, key_type: torch.dtype, size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of a snapshot, at most ``size`` at a time.

        Args:
            owner: prefix of error messages.
            name: of the snapshot.
            key_type: of the keys, of as many bytes as these have.
            size: maximum number of rows of a batch.

        Returns:
            An iterator of keys [n] and values float32 [n, elements].

        Raises:
            FileNotFoundError: a file is missing; the iterator raises it.
            ValueError: a file is too short; the iterator raises it.
        """
        for chunk, index_file in self.chunks(owner, name):
            numbers = _mapped(owner, index_file, torch.int64).sort().values
            numbers = numbers - chunk * self.values_per_chunk
            key_file = self.folder / "keys" / f"key-{chunk:0{_DIGITS}}"
            value_file = self.folder / "values" / f"value-{chunk:0{_DIGITS}}"
            keys = _mapped(owner, key_file, key_type)
            blocks = _mapped(owner, value_file, torch.float32)
            elements = self.block_bytes // 4
            whole = blocks.shape[0] // elements
            rows = min(keys.shape[0], whole * self.values_per_block)
            if numbers.numel() > 0 and (int(numbers[0]) < 0 or int(numbers[-1]) >= rows):
                raise ValueError(
                    f"{owner}: {index_file} names row {int(numbers[-1])} of a chunk, but "
                    f"{key_file} and {value_file} have {rows} rows: files are cut off"
                )
            columns = self.value_bytes // 4
            values = blocks.as_strided(
                (whole, self.values_per_block, columns), (elements, columns, 1)
            )
            for part in numbers.split(size):
                in_block = part % self.values_per_block
                yield keys[part], values[part // self.values_per_block, in_block]


def is_oneflow_table(folder: Path) -> bool:
    """Whether a folder is one that OneFlow has written."""
    return (folder / "KEY_SIZE").is_file() and (folder / "keys").is_dir()


def oneflow_table(owner: str, folder: Path, physical_block_size: int) -> OneFlowTable:
    """Reads what the folder of a rank says of itself.

    Args:
        owner: prefix of error messages.
        folder: of the rank.
        physical_block_size: that it should have.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: it has another block size, or no sizes.
    """
    found = _number(owner, folder / "PHYSICAL_BLOCK_SIZE")
    if found != physical_block_size:
        raise ValueError(
            f"{owner}: physical_block_size is {physical_block_size}, but {folder} was written with "
            f"{found}: give that"
        )
    key_bytes = _number(owner, folder / "KEY_SIZE")
    value_bytes = _number(owner, folder / "VALUE_SIZE")
    if value_bytes % 4 != 0:
        raise ValueError(
            f"{owner}: values of {folder} have {value_bytes} bytes, expected a multiple of 4: only "
            "float32 is known"
        )
    block = -(-value_bytes // found) * found
    per_block = block // value_bytes
    per_chunk = per_block * _number(owner, folder / "NUM_LOGICAL_BLOCKS_PER_CHUNK")
    return OneFlowTable(folder, key_bytes, value_bytes, block, per_block, per_chunk)


def _number(owner: str, path: Path) -> int:
    if not path.is_file():
        raise FileNotFoundError(f"{owner}: {path} is missing")
    text = path.read_text().strip()
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{owner}: {path} has {text[:40]!r}, expected a number above 0")
    return int(text)


def _mapped(owner: str, path: Path, dtype: torch.dtype) -> Tensor:
    """The whole elements of a file, of which only the pages that are read take memory."""
    if not path.is_file():
        raise FileNotFoundError(f"{owner}: {path} is missing")
    count = path.stat().st_size // dtype.itemsize
    if count == 0:
        return torch.empty(0, dtype=dtype)
    # as int64 or int32: from_file knows no unsigned types
    signed = {8: torch.int64, 4: torch.int32}[dtype.itemsize]
    return torch.from_file(str(path), shared=False, size=count, dtype=signed).view(dtype)


__all__ = ["OneFlowTable", "is_oneflow_table", "oneflow_table"]
