"""Files with a checksum per 8 MiB block: written once from front to back, checked when read.

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

Files = TypeVar("Files", bound="ChecksummedReaders")

BLOCK_BYTES = 8 << 20


class FileChecksums(NamedTuple):
    """Size and checksums of a whole file.

    Attributes:
        bytes: size of the file.
        block_bytes: size of a block; the last one may be shorter.
        sums: crc32c of each block.
    """

    bytes: int
    block_bytes: int
    sums: tuple[int, ...]


class ChecksummedWriter:
    """Writer of a file that computes checksums.

    Args:
        disk: the file system.
        path: the file, which must not exist yet.
        block_bytes: size of a block; default: 8 MiB.
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
        """Append the values of a contiguous CPU tensor.

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

    def end(self) -> FileChecksums:
        """Return the checksums after the last byte. The file need not be on the disk yet."""
        rest = self._bytes % self._block_bytes
        if rest != 0:
            self._end_block(rest)
        return FileChecksums(self._bytes, self._block_bytes, tuple(self._sums))

    def sync(self) -> None:
        """Wait until the file is on the disk, then close it."""
        with space_errors(self._path, self._bytes):
            self._disk.sync(self._file)
        self.close()

    def finish(self) -> FileChecksums:
        """Call :meth:`end` and :meth:`sync`."""
        sums = self.end()
        self.sync()
        return sums

    def close(self) -> None:
        """Close the file, complete or not."""
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
    """Add sizes and a remedy to errors of a full disk.

    Args:
        path: file or folder that is written.
        written: bytes of it that are on the disk.

    Raises:
        DiskFullError: the disk is full.
        OSError: any other error raised inside.
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
            "checkpoint from before is unchanged",
            str(path),
        ) from error


class ChecksummedReader:
    """Reader of tensors that checks every block it reads.

    Reading goes from front to back, so that each block is read once; a step back starts its block
    anew. Values may be used only after :meth:`finish` has returned.

    Args:
        path: the file.
        sums: its expected size and checksums.
        checked: False: do not compare checksums, as after :func:`check_file`.
        verified: blocks that are already checked, and need no second check. Blocks checked here are
            added. Readers of one file may share it.
        has_header: whether it is a file of tensors.

    Raises:
        DamagedFileError: it is missing, or its size or header is wrong.
    """

    def __init__(
        self,
        path: Path,
        sums: FileChecksums,
        *,
        checked: bool = True,
        verified: set[int] | None = None,
        has_header: bool = True,
    ) -> None:
        self.path, self._sums, self._checked = path, sums, checked
        self._verified = set() if verified is None else verified
        try:
            # O_NONBLOCK: return at once if the path is a FIFO without a writer
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
                raise DamagedFileError(f"{path}: it is not a regular file", path=path)
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
        """Return the tensors by name."""
        try:
            first = torch.empty(min(8, self._sums.bytes), dtype=torch.uint8)
            self._read(0, first)
            length = header_bytes(bytes(raw(first)))
            if 8 + length > self._sums.bytes:
                raise ValueError(f"its header claims {length} bytes, more than the file has")
            text = torch.empty(length, dtype=torch.uint8)
            self._read(8, text)
            return sections_of(bytes(raw(text)), 8 + length, self._sums.bytes)
        except DamagedFileError:
            raise
        except ValueError as error:
            raise DamagedFileError(f"{self.path}: {error}", path=self.path) from error

    def read(self, name: str, begin: int, out: Tensor) -> None:
        """Read rows of a tensor into a contiguous CPU tensor.

        Args:
            name: name of the tensor.
            begin: first row.
            out: tensor to fill, with the dtype and columns of the file's.

        Raises:
            DamagedFileError: a block is damaged.
        """
        section = self.tensors[name]
        assert out.dtype == section.dtype
        assert out.numel() * out.element_size() == out.shape[0] * section.row_bytes
        assert out.is_contiguous()
        if out.numel() > 0:
            self._read(section.begin + begin * section.row_bytes, as_bytes(out))

    def read_block(self, number: int, out: Tensor) -> None:
        """Read a whole block into a CPU tensor. It is checked when this returns.

        Args:
            number: number of the block.
            out: uint8 tensor of the block's size.

        Raises:
            DamagedFileError: the block is damaged.
        """
        self._read(number * self._block, out)

    def read_bytes(self, begin: int, size: int) -> Tensor:
        """Return unchecked bytes, uint8 [n]; fewer at the end of the file.

        Args:
            begin: first byte.
            size: number of bytes.

        Raises:
            ValueError: the file is closed.
        """
        if not self._open:
            raise ValueError(f"{self.path} is closed: open the checkpoint again to read of it")
        out = torch.empty(max(0, min(size, self._sums.bytes - begin)), dtype=torch.uint8)
        self._fill(out, begin)
        return out

    def _read(self, begin: int, out: Tensor) -> None:
        """Read bytes from an offset on; a checked block from its beginning."""
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
            # a block at a time: each has its own checksum
            room = min(end - self._at, self._block - self._at % self._block)
            self._take(self._scratch[:room])

    def _fill(self, out: Tensor, begin: int) -> None:
        """Read unchecked bytes from an offset on."""
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
        """Read the next bytes of the block that is being checked."""
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
        """Check the block that was read last, to its end.

        Raises:
            DamagedFileError: it is damaged.
        """
        block = self._at // self._block
        begun = self._at % self._block != 0 and self._at < self._sums.bytes
        if self._checked and begun and block not in self._verified:
            self._skip_to(min(self._sums.bytes, (block + 1) * self._block))

    def close(self) -> None:
        """Close the file."""
        if self._open:
            self._open = False
            os.close(self._file)


class ChecksummedReaders:
    """Readers that are closed together; a base class.

    As a context, it closes them at its end. A ValueError inside may come from a damaged file: then
    the DamagedFileError is raised instead.
    """

    def __init__(self) -> None:
        self._readers: list[ChecksummedReader] = []

    def finish(self) -> None:
        """Check the blocks that were read last, to their ends."""
        for reader in self._readers:
            reader.finish()

    def close(self) -> None:
        """Close the files."""
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


def read_tensors(path: Path, sums: FileChecksums) -> dict[str, Tensor]:
    """Return all tensors of a file, by name.

    Raises:
        DamagedFileError: it is missing or damaged.
    """
    reader = ChecksummedReader(path, sums)
    try:
        tensors = {}
        for name, section in reader.tensors.items():
            tensors[name] = torch.empty(section.shape, dtype=section.dtype)
            reader.read(name, 0, tensors[name])
        reader.finish()
    finally:
        reader.close()
    return tensors


def check_file(path: Path, sums: FileChecksums) -> None:
    """Check a whole file.

    Raises:
        DamagedFileError: it is missing or damaged.
    """
    reader = ChecksummedReader(path, sums)
    try:
        reader._skip_to(sums.bytes)
    finally:
        reader.close()


def checksum_of_bytes(data: bytes | Sequence[int]) -> int:
    """Return the crc32c of bytes."""
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return ops.crc32c(values, 0)


__all__ = [
    "BLOCK_BYTES",
    "ChecksummedReader",
    "ChecksummedReaders",
    "ChecksummedWriter",
    "FileChecksums",
    "check_file",
    "checksum_of_bytes",
    "read_tensors",
    "space_errors",
]
