"""Reader of OneFlow's OneEmbedding snapshots.

The folder of a rank holds

* ``keys/key-<chunk>`` and ``values/value-<chunk>``, to which every write appends. A chunk is 4 GiB
  of values. Values lie in blocks: as many as fit into a sector of the disk, or one value in as many
  sectors as it needs.
* ``snapshots/<name>/index-<chunk>``: the numbers of the rows that belong to the snapshot, uint64.
  ``snapshots/<name>/LIST`` names these files.
* sizes, as text in files named after them.
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
    """Folder of one rank.

    Attributes:
        folder: with ``keys`` and ``values``.
        key_bytes, value_bytes: of one row.
        block_bytes: of one block of values, padding included.
        values_per_block: number of values in a block.
        values_per_chunk: rows of a file.
    """

    folder: Path
    key_bytes: int
    value_bytes: int
    block_bytes: int
    values_per_block: int
    values_per_chunk: int

    def chunks(self, owner: str, name: str) -> list[tuple[int, Path]]:
        """List the chunks that hold rows of a snapshot, each with its index file.

        Args:
            owner: prefix of error messages.
            name: of the snapshot.

        Raises:
            FileNotFoundError: the snapshot does not exist.
            ValueError: its list names a file that is not an index.
        """
        folder = self.folder / SNAPSHOTS / name
        listed = folder / "LIST"
        if not listed.is_file():
            raise FileNotFoundError(f"{owner}: {folder} is not a snapshot: it lacks the file LIST")
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
        """Read the rows of a snapshot, at most ``size`` at a time.

        Args:
            owner: prefix of error messages.
            name: of the snapshot.
            key_type: of the keys, of the same number of bytes.
            size: maximum number of rows of a batch.

        Returns:
            An iterator of keys [n] and values float32 [n, elements].

        Raises:
            FileNotFoundError: a file is missing (raised by the iterator).
            ValueError: a file is too short (raised by the iterator).
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
                    f"{key_file} and {value_file} have {rows} rows: files are truncated"
                )
            columns = self.value_bytes // 4
            values = blocks.as_strided(
                (whole, self.values_per_block, columns), (elements, columns, 1)
            )
            for part in numbers.split(size):
                in_block = part % self.values_per_block
                yield keys[part], values[part // self.values_per_block, in_block]


def is_oneflow_table(folder: Path) -> bool:
    """Return whether OneFlow has written a folder."""
    return (folder / "KEY_SIZE").is_file() and (folder / "keys").is_dir()


def oneflow_table(owner: str, folder: Path, physical_block_size: int) -> OneFlowTable:
    """Read the sizes in the folder of a rank.

    Args:
        owner: prefix of error messages.
        folder: of the rank.
        physical_block_size: expected bytes of a sector.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: it has another block size or invalid sizes.
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
            "float32 is supported"
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
    """Map the whole elements of a file; only pages that are read take memory."""
    if not path.is_file():
        raise FileNotFoundError(f"{owner}: {path} is missing")
    count = path.stat().st_size // dtype.itemsize
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    # as int64 or int32: from_file does not support unsigned types
    signed = {8: torch.int64, 4: torch.int32}[dtype.itemsize]
    return torch.from_file(str(path), shared=False, size=count, dtype=signed).view(dtype)


__all__ = ["OneFlowTable", "is_oneflow_table", "oneflow_table"]
