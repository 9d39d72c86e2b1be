"""Files with a checksum for every 8 MiB: written once from front to back, checked when read.

The checksum is crc32c (Castagnoli; RFC 3720, appendix B.4).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.files.disk import Disk
from torch_dynemb.checkpoint.files.tensor_file import (
    StoredTensor,
    as_bytes,
    header_bytes,
    raw,
    sections_of,
)
from torch_dynemb.errors import DamagedFileError, DiskFullError

Files = TypeVar("Files", bound="SummedReaders")

BLOCK_BYTES = 8 << 20


class FileSums(NamedTuple):
    """What is known of a whole file.

    Attributes:
        bytes: its size.
        block_bytes: of a block; the last one may be shorter.
        sums: crc32c of each block.
    """

    bytes: int
    block_bytes: int
    sums: tuple[int, ...]


class ChecksummedWriter:
    """Writes a file and sums what it writes.

    Args:
        disk: the file system.
        path: of a file that is not there yet.
        block_bytes: of a block; default: 8 MiB.
    """

    def __init__(self, disk: Disk, path: Path, block_bytes: int | None = None) -> None:
        self._disk, self._path = disk, path
        self._block_bytes = BLOCK_BYTES if block_bytes is None else block_bytes
        with space_errors(path):
            self._file = disk.create(path)
        self._open = True
        self._bytes = 0
        self._sums: list[int] = []
        self._sum = 0

    def write(self, data: Tensor) -> None:
        """Writes the values of a contiguous tensor of the CPU.

        Raises:
            OSError: the disk is full, or fails.
        """
        assert data.is_contiguous()
        values = as_bytes(data)
        begin = 0
        while begin < values.numel():
            room = self._block_bytes - self._bytes % self._block_bytes
            piece = values[begin : begin + room]
            self._write_all(raw(piece))
            self._sum = ops.crc32c(piece, self._sum)
            self._bytes += piece.numel()
            begin += piece.numel()
            if self._bytes % self._block_bytes == 0:
                self._end_block(self._block_bytes)

    def _write_all(self, data: memoryview) -> None:
        begin = 0
        while begin < len(data):
            with space_errors(self._path, self._bytes + begin):
                begin += self._disk.write(self._file, data[begin:])

    def _end_block(self, size: int) -> None:
        self._sums.append(self._sum)
        self._sum = 0
        self._disk.begin_sync(self._file, self._bytes - size, size)

    def end(self) -> FileSums:
        """After the last byte; the file is not on the disk yet."""
        rest = self._bytes % self._block_bytes
        if rest != 0:
            self._end_block(rest)
        return FileSums(self._bytes, self._block_bytes, tuple(self._sums))

    def sync(self) -> None:
        """Waits until the file is on the disk, and closes it."""
        with space_errors(self._path, self._bytes):
            self._disk.sync(self._file)
        self.close()

    def finish(self) -> FileSums:
        """:meth:`end` and :meth:`sync`."""
        sums = self.end()
        self.sync()
        return sums

    def close(self) -> None:
        """Closes the file, whole or not."""
        if self._open:
            self._open = False
            self._disk.close(self._file)


_REMEDIES = {
    errno.ENOSPC: "make room, or save elsewhere",
    errno.EDQUOT: "make room within your quota, or save elsewhere",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f)",
}


@contextmanager
def space_errors(path: Path, written: int = 0) -> Iterator[None]:
    """Has errors of a disk without room say what there is in bytes, and what to do.

    Args:
        path: of the file or folder that is written.
        written: bytes of it that are on the disk.

    Raises:
        DiskFullError: there is no room.
        OSError: what is raised inside.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        place = next(folder for folder in path.parents if folder.is_dir())
        raise DiskFullError(
            error.errno,
            f"{os.strerror(error.errno)} after {written} bytes of {path.name}, "
            f"{shutil.disk_usage(place).free} bytes are free: {_REMEDIES[error.errno]}; the "
            "checkpoint that was there before is as it was",
            str(path),
        ) from error


class SummedReader:
    """Reads tensors of a file and checks every block that it reads, or has been told not to.

    Reading goes from front to back, so that a block is read once; going back begins anew. What has
    been read may be used when :meth:`finish` has returned.

    Args:
        path: of the file.
        sums: what it should be.
        checked: False: the sums are not compared, as after :func:`check_file`.
        verified: blocks whose sums have been compared, which are not compared again; those that
            are read here are added. Readers of one file may share it.
        has_header: it is a file of tensors.

    Raises:
        DamagedFileError: it is missing, or has another size, or its header is wrong.
    """

    def __init__(
        self,
        path: Path,
        sums: FileSums,
        *,
        checked: bool = True,
        verified: set[int] | None = None,
        has_header: bool = True,
    ) -> None:
        self.path, self._sums, self._checked = path, sums, checked
        self._verified = set() if verified is None else verified
        try:
            # at once also where something else has its name that nobody writes to
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedFileError(f"{path}: the file is missing", path=path) from None
        self._open = True
        self._at = 0  # in the file
        self._sum = 0  # of the block from its beginning to there
        self._scratch: Tensor | None = None
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedFileError(f"{path}: it is no file", path=path)
            size = status.st_size
            if size != sums.bytes:
                raise DamagedFileError(
                    f"{path}: the file has {size} bytes, expected {sums.bytes}: it was cut off or "
                    "written to",
                    path=path,
                )
            self.tensors = self._read_header() if has_header else {}
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> dict[str, StoredTensor]:
        """The tensors by name."""
        try:
            first = torch.empty(min(8, self._sums.bytes), dtype=torch.uint8)
            self._read(0, first)
            length = header_bytes(bytes(raw(first)))
            if 8 + length > self._sums.bytes:
                raise ValueError(f"its header would have {length} bytes")
            text = torch.empty(length, dtype=torch.uint8)
            self._read(8, text)
            return sections_of(bytes(raw(text)), 8 + length, self._sums.bytes)
        except DamagedFileError:
            raise
        except ValueError as error:
            raise DamagedFileError(f"{self.path}: {error}", path=self.path) from error

    def read(self, name: str, begin: int, out: Tensor) -> None:
        """Fills a contiguous tensor of the CPU with rows of a tensor of the file.

        Args:
            name: of the tensor.
            begin: the first row.
            out: as many rows as there are, of its dtype and columns.

        Raises:
            DamagedFileError: a block is not what was written.
        """
        section = self.tensors[name]
        assert out.dtype == section.dtype
        assert out.numel() * out.element_size() == out.shape[0] * section.row_bytes
        assert out.is_contiguous()
        if out.numel() > 0:
            self._read(section.begin + begin * section.row_bytes, as_bytes(out))

    def read_block(self, number: int, out: Tensor) -> None:
        """Fills uint8 of the CPU with a whole block, which is what was written when this returns.

        Args:
            number: of the block.
            out: as many bytes as it has.

        Raises:
            DamagedFileError: it is not what was written.
        """
        self._read(number * self._block, out)

    def read_bytes(self, begin: int, size: int) -> Tensor:
        """Bytes of the file, which are not checked; uint8 [n], fewer where the file ends.

        Args:
            begin: the first of them.
            size: how many.

        Raises:
            ValueError: the file is closed.
        """
        if not self._open:
            raise ValueError(f"{self.path} is closed: open the checkpoint again to read of it")
        out = torch.empty(max(0, min(size, self._sums.bytes - begin)), dtype=torch.uint8)
        self._fill(out, begin)
        return out

    def _read(self, begin: int, out: Tensor) -> None:
        """Bytes from there on; of a block that is checked, after those before them."""
        done = 0
        while done < out.numel():
            at = begin + done
            block = at // self._block
            room = (block + 1) * self._block - at if self._checked else out.numel()
            piece = out[done : done + room]
            if self._checked and block not in self._verified:
                if at < self._at or block > self._at // self._block:
                    self.finish()
                    self._at, self._sum = block * self._block, 0
                self._skip_to(at)
                self._take(piece)
            else:
                self._fill(piece, at)
            done += piece.numel()

    @property
    def _block(self) -> int:
        return self._sums.block_bytes

    def _skip_to(self, end: int) -> None:
        if self._at < end and self._scratch is None:
            self._scratch = torch.empty(min(self._block, self._sums.bytes), dtype=torch.uint8)
        while self._at < end:
            assert self._scratch is not None
            # a block at a time: each has a sum of its own
            room = min(end - self._at, self._block - self._at % self._block)
            self._take(self._scratch[:room])

    def _fill(self, out: Tensor, begin: int) -> None:
        """Reads bytes from there on."""
        view = raw(out)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._file, [view[done:]], begin + done)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            if count == 0:
                raise DamagedFileError(
                    f"{self.path}: the file ends at byte {begin + done}", path=self.path
                )
            done += count

    def _take(self, out: Tensor) -> None:
        """Reads the next bytes of the block that is being checked."""
        self._fill(out, self._at)
        block = self._at // self._block
        self._at += out.numel()
        self._sum = ops.crc32c(out, self._sum)
        if self._at % self._block == 0 or self._at == self._sums.bytes:
            expected = self._sums.sums[block]
            if self._sum != expected:
                raise DamagedFileError(
                    f"{self.path}: block {block} (bytes {block * self._block} to {self._at}) has "
                    f"the checksum {self._sum:08x}, expected {expected:08x}: the file was damaged "
                    "after it was written",
                    path=self.path,
                )
            self._sum = 0
            self._verified.add(block)

    def finish(self) -> None:
        """Checks the block that was read last to its end.

        Raises:
            DamagedFileError: it is not what was written.
        """
        block = self._at // self._block
        begun = self._at % self._block != 0 and self._at < self._sums.bytes
        if self._checked and begun and block not in self._verified:
            self._skip_to(min(self._sums.bytes, (block + 1) * self._block))

    def close(self) -> None:
        """Closes the file."""
        if self._open:
            self._open = False
            os.close(self._file)


class SummedReaders:
    """Readers that are closed together; a base class.

    As a context, it closes them at its end. What was read may be wrong because a file is damaged;
    then that is raised, and not what was made of it.
    """

    def __init__(self) -> None:
        self._readers: list[SummedReader] = []

    def finish(self) -> None:
        """Checks what was read last to the end of its block."""
        for reader in self._readers:
            reader.finish()

    def close(self) -> None:
        """Closes the files."""
        for reader in self._readers:
            reader.close()

    def __enter__(self: Files) -> Files:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, ValueError) and not isinstance(error, DamagedFileError):
                self.finish()
        finally:
            self.close()


def read_tensors(path: Path, sums: FileSums) -> dict[str, Tensor]:
    """All tensors of a file, by name.

    Raises:
        DamagedFileError: it is missing, or not what was written.
    """
    reader = SummedReader(path, sums)
    try:
        tensors = {}
        for name, section in reader.tensors.items():
            tensors[name] = torch.empty(section.shape, dtype=section.dtype)
            reader.read(name, 0, tensors[name])
        reader.finish()
    finally:
        reader.close()
    return tensors


def check_file(path: Path, sums: FileSums) -> None:
    """Reads a whole file.

    Raises:
        DamagedFileError: it is missing, or not what was written.
    """
    reader = SummedReader(path, sums)
    try:
        reader._skip_to(sums.bytes)
    finally:
        reader.close()


def sums_of_bytes(data: bytes | Sequence[int]) -> int:
    """crc32c of bytes."""
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return ops.crc32c(values, 0)


__all__ = [
    "BLOCK_BYTES",
    "ChecksummedWriter",
    "FileSums",
    "SummedReader",
    "SummedReaders",
    "check_file",
    "read_tensors",
    "space_errors",
    "sums_of_bytes",
]
