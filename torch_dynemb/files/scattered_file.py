"""Writer of a file with tensors that grow side by side, piece by piece.

Tensors lie one after another in a file, so each piece is written at its own offset. The checksum of
a block is combined from those of its pieces. Nothing is read back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.files.checksummed_files import BLOCK_BYTES, FileChecksums, space_errors
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location
from torch_dynemb.files.tensor_file import TensorShape, header_of, raw
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


_HEADER = ""  # its name among the tensors


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
        progress: called with the bytes of each block that is complete.
    """

    def __init__(
        self,
        disk: Disk,
        path: Location,
        tensors: Sequence[TensorShape],
        progress: Callable[[int], object] | None = None,
    ) -> None:
        header = header_of(tensors)
        self._disk, self._path, self._progress = disk, path, progress
        self._block = limits_of(disk).block_bytes or BLOCK_BYTES
        self._tails: dict[str, _Tail] = {}
        self._shapes: dict[str, TensorShape] = {}
        # by block: consecutive bytes by their end, as their beginning and checksum
        self._blocks: dict[int, dict[int, tuple[int, int]]] = {}
        self._missing: dict[int, int] = {}  # by block: bytes that are not written yet
        self._tails[_HEADER] = _Tail(0, len(header))
        self._bytes = len(header)
        sizes = [tensor.bytes for tensor in tensors]
        for tensor, size in zip(tensors, sizes, strict=True):
            self._tails[tensor.name] = _Tail(self._bytes, size)
            self._shapes[tensor.name] = tensor
            self._bytes += size
        with space_errors(path):
            self._file = disk.create(path)
        self._open = True
        try:
            self.append(_HEADER, torch.frombuffer(bytearray(header), dtype=torch.uint8))
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
        tail, data, done = self._tails[name], raw(values), 0
        if tail.at + len(data) > tail.end:
            raise RuntimeError(
                f"checkpoint: {self._path.name} got more rows than it was created for"
            )
        while done < len(data):
            number = tail.at // self._block
            begin = number * self._block
            size = min(self._block, self._bytes - begin)
            part = data[done : done + begin + size - tail.at]
            block = self._blocks.setdefault(number, {})
            first, crc = block.pop(tail.at, (tail.at, 0))
            written = 0
            try:
                while written < len(part):
                    written += self._disk.write_at(self._file, part[written:], tail.at + written)
            except OSError:
                with space_errors(self._path, tail.at + written):
                    raise
            done, tail.at = done + written, tail.at + written
            block[tail.at] = first, ops.crc32c(torch.frombuffer(part, dtype=torch.uint8), crc)
            self._missing[number] = self._missing.get(number, size) - written
            if self._missing[number] == 0:
                self._disk.begin_sync(self._file, begin, size)
                if self._progress is not None:
                    self._progress(size)

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
        for _, block in sorted(self._blocks.items()):
            (_, (_, total)), *others = sorted(block.items())
            for end, (begin, crc) in others:
                total = joined_crc32c(total, crc, end - begin)
            sums.append(total)
        with space_errors(self._path, self._bytes):
            self._disk.end(self._file)
        return FileChecksums(self._bytes, self._block, tuple(sums))

    def close(self) -> None:
        """Close the file, complete or not."""
        if self._open:
            self._open = False
            self._disk.close(self._file)

    def __enter__(self) -> ScatteredFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the file after an error; else :meth:`sync` closes it."""
        if error is not None:
            self.close()


__all__ = ["ScatteredFile", "joined_crc32c"]
