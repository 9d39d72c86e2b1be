"""Writer of a file with tensors that grow side by side, piece by piece.

Tensors lie one after another in a file, so each piece is written at its own offset. The checksum of
a block is combined from those of its pieces. Nothing is read back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.files.checksummed_files import BLOCK_BYTES, FileChecksums, space_errors
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location
from torch_dynemb.files.tensor_file import TensorShape, as_bytes, header_of, raw
from torch_dynemb.files.uploads import limits_of


def joined_crc32c(first: int, second: int, second_bytes: int) -> int:
    """Combine the checksums of two consecutive pieces.

    The checksum is affine over bits. That of ``a`` followed by ``b`` differs from that of ``a``
    followed by zeros as the checksum of ``b`` differs from that of as many zeros.

    Args:
        first: checksum of the first piece.
        second, second_bytes: checksum and length of the second piece.
    """
    zeros = torch.zeros(second_bytes, dtype=torch.uint8, device="cpu")
    return ops.crc32c(zeros, first) ^ ops.crc32c(zeros) ^ second


class _Run:
    """Consecutive bytes of a block, with their checksum."""

    def __init__(self, begin: int) -> None:
        self.begin, self.bytes, self.sum = begin, 0, 0


class _Tail:
    """Write position and end of a tensor."""

    def __init__(self, begin: int, size: int) -> None:
        self.at, self.end = begin, begin + size


class ScatteredFile:
    """Writer of a file with tensors that grow side by side.

    Args:
        disk: the file system.
        path: the file, which must not exist yet.
        tensors: its tensors, in order.
    """

    def __init__(self, disk: Disk, path: Location, tensors: Sequence[TensorShape]) -> None:
        header = header_of(tensors)
        self._disk, self._path = disk, path
        self._block = limits_of(disk).block_bytes or BLOCK_BYTES
        self._tails: dict[str, _Tail] = {}
        self._shapes: dict[str, TensorShape] = {}
        self._pieces: dict[int, list[_Run]] = {}  # by block
        self._bytes = len(header)
        for tensor in tensors:
            self._tails[tensor.name] = _Tail(self._bytes, tensor.bytes)
            self._shapes[tensor.name] = tensor
            self._bytes += tensor.bytes
        with space_errors(path):
            self._file = disk.create(path)
        self._open = True
        try:
            self._write(
                _Tail(0, len(header)), torch.frombuffer(bytearray(header), dtype=torch.uint8)
            )
        except BaseException:
            self.close()
            raise

    def room(self, name: str, rows: int) -> Tensor | None:
        """Return memory for the next rows of a tensor, from which they are written without a copy.

        It is None where the disk has none, or has no aligned one. The memory is valid until rows
        are appended.

        Args:
            name: name of the tensor.
            rows: their number.
        """
        tail, shape = self._tails[name], self._shapes[name]
        size = rows * math.prod(shape.shape[1:]) * shape.dtype.itemsize
        memory = self._disk.room_at(self._file, tail.at, size) if size > 0 else None
        if memory is None or memory.data_ptr() % shape.dtype.itemsize != 0:
            return None
        return memory.view(shape.dtype).view(rows, *shape.shape[1:])

    def append(self, name: str, values: Tensor) -> None:
        """Append rows to a tensor.

        Args:
            name: name of the tensor.
            values: contiguous CPU tensor with its dtype and columns.

        Raises:
            OSError: the disk is full, or fails.
        """
        assert values.is_contiguous()
        self._write(self._tails[name], as_bytes(values))

    def _write(self, tail: _Tail, data: Tensor) -> None:
        if tail.at + data.numel() > tail.end:
            raise RuntimeError(
                f"checkpoint: {self._path.name} got more rows than it was created for"
            )
        done = 0
        while done < data.numel():
            block, inside = divmod(tail.at, self._block)
            part = data[done : done + self._block - inside]
            pieces = self._pieces.setdefault(block, [])
            piece = next((of for of in pieces if of.begin + of.bytes == tail.at), None)
            if piece is None:
                piece = _Run(tail.at)
                pieces.append(piece)
            self._write_all(raw(part), tail.at)
            piece.sum = ops.crc32c(part, piece.sum)
            piece.bytes += part.numel()
            tail.at += part.numel()
            done += part.numel()
            self._begin_sync(block)

    def _begin_sync(self, block: int) -> None:
        """Start writing a complete block to the disk."""
        begin = block * self._block
        size = min(self._block, self._bytes - begin)
        if sum(piece.bytes for piece in self._pieces[block]) == size:
            self._disk.begin_sync(self._file, begin, size)

    def _write_all(self, data: memoryview, begin: int) -> None:
        done = 0
        while done < len(data):
            with space_errors(self._path, begin + done):
                done += self._disk.write_at(self._file, data[done:], begin + done)

    def finish(self) -> FileChecksums:
        """Call :meth:`end` and :meth:`sync`.

        Raises:
            OSError: the disk is full, or fails.
            RuntimeError: rows are missing.
        """
        sums = self.end()
        self.sync()
        return sums

    def sync(self) -> None:
        """Wait until the file is on the disk, then close it.

        Raises:
            OSError: the disk is full, or fails.
        """
        with space_errors(self._path, self._bytes):
            self._disk.sync(self._file)
        self.close()

    def end(self) -> FileChecksums:
        """Return the checksums after the last row. The file need not be on the disk yet.

        Raises:
            RuntimeError: rows are missing.
        """
        short = [name for name, tail in self._tails.items() if tail.at < tail.end]
        if short:
            raise RuntimeError(f"checkpoint: {self._path.name} lacks rows of {short}")
        sums = []
        for block in sorted(self._pieces):
            first, *others = sorted(self._pieces[block], key=lambda piece: piece.begin)
            total = first.sum
            for piece in others:
                total = joined_crc32c(total, piece.sum, piece.bytes)
            sums.append(total)
        with space_errors(self._path, self._bytes):
            self._disk.end(self._file)
        return FileChecksums(self._bytes, self._block, tuple(sums))

    def close(self) -> None:
        """Close the file, complete or not."""
        if self._open:
            self._open = False
            self._disk.close(self._file)


__all__ = ["ScatteredFile", "joined_crc32c"]
