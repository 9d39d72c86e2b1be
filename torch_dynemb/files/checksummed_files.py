"""Files with a checksum per 8 MiB block: written once from front to back, checked when read.

The checksum is crc32c (Castagnoli; RFC 3720, appendix B.4).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import DamagedFileError, DiskFullError
from torch_dynemb.files.byte_files import open_file
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location
from torch_dynemb.files.tensor_file import (
    StoredTensor,
    as_bytes,
    header_bytes,
    raw,
    sections_of,
)
from torch_dynemb.files.uploads import limits_of

Files = TypeVar("Files", bound="ChecksummedReaders")

BLOCK_BYTES = 8 << 20
_OPENED_AT_ONCE = 16
_AHEAD_BYTES = 16 << 20  # requested at once where nothing reads ahead


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
        block_bytes: size of a block; default: that of the disk, 8 MiB for a local one.
    """

    def __init__(self, disk: Disk, path: Location, block_bytes: int | None = None) -> None:
        self._disk, self._path = disk, path
        self._block_bytes = block_bytes or limits_of(disk).block_bytes or BLOCK_BYTES
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
        done = 0
        try:
            while done < len(data):
                done += self._disk.write_at(self._file, data[done:], self._bytes + done)
        except OSError:
            with space_errors(self._path, self._bytes + done):
                raise

    def _end_block(self, size: int) -> None:
        self._sums.append(self._sum)
        self._sum = 0
        self._disk.begin_sync(self._file, self._bytes - size, size)

    def end(self) -> FileChecksums:
        """Return the checksums after the last byte. The file need not be on the disk yet."""
        rest = self._bytes % self._block_bytes
        if rest != 0:
            self._end_block(rest)
        with space_errors(self._path, self._bytes):
            self._disk.end(self._file)
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


def write_file(disk: Disk, path: Location, data: bytes) -> None:
    """Write a new file, and wait until it is on the disk. Its name may not be there yet.

    Args:
        disk: the file system.
        path: the file.
        data: its content.

    Raises:
        OSError: the disk is full, or fails.
    """
    writer = ChecksummedWriter(disk, path)
    try:
        writer.write(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        writer.finish()
    finally:
        writer.close()


_REMEDIES = {
    errno.ENOSPC: "make room, or save elsewhere",
    errno.EDQUOT: "make room within your quota, or save elsewhere",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f)",
}


@contextmanager
def space_errors(path: Location, written: int = 0) -> Iterator[None]:
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
        if error.errno not in _REMEDIES or not isinstance(path, Path):
            raise
        place = next(folder for folder in path.parents if folder.is_dir())
        raise DiskFullError(
            error.errno,
            f"{os.strerror(error.errno)} after {written} bytes of {path.name}, "
            f"{shutil.disk_usage(place).free} bytes are free: {_REMEDIES[error.errno]}; "
            "what was there before is unchanged",
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
        path: Location,
        sums: FileChecksums,
        *,
        checked: bool = True,
        verified: set[int] | None = None,
        has_header: bool = True,
    ) -> None:
        self.path, self._sums, self._checked = path, sums, checked
        self._verified = set() if verified is None else verified
        self._file = open_file(path, sums.bytes, sums.block_bytes)
        self._open = True
        self._at = 0  # in the file
        self._sum = 0  # of the block from its beginning to there
        self._scratch: Tensor | None = None
        try:
            self.tensors = self._read_header() if has_header else {}
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> dict[str, StoredTensor]:
        """Return the tensors by name."""
        try:
            first = torch.empty(min(8, self._sums.bytes), dtype=torch.uint8, device="cpu")
            self._read(0, first)
            length = header_bytes(bytes(raw(first)))
            if 8 + length > self._sums.bytes:
                raise ValueError(f"its header claims {length} bytes, more than the file has")
            text = torch.empty(length, dtype=torch.uint8, device="cpu")
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

    def expect_blocks(self, number: int) -> None:
        """Prepare for reads of whole blocks, from one on.

        Args:
            number: number of the block.
        """
        begin = number * self._block
        if begin % _AHEAD_BYTES < self._block:
            self._file.expect(begin, _AHEAD_BYTES)

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
        out = torch.empty(
            max(0, min(size, self._sums.bytes - begin)), dtype=torch.uint8, device="cpu"
        )
        self._fill(out, begin)
        return out

    def _read(self, begin: int, out: Tensor) -> None:
        """Read bytes from an offset on; a checked block from its beginning."""
        self._file.expect(begin, out.numel())
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
            self._scratch = torch.empty(
                min(self._block, self._sums.bytes), dtype=torch.uint8, device="cpu"
            )
        while self._at < end:
            assert self._scratch is not None
            # a block at a time: each has its own checksum
            room = min(end - self._at, self._block - self._at % self._block)
            self._take(self._scratch[:room])

    def skip_to_end(self) -> None:
        """Check the file from the last byte that was read to its end.

        Raises:
            DamagedFileError: a block is damaged.
        """
        while self._at < self._sums.bytes:
            self._file.expect(self._at, _AHEAD_BYTES)
            self._skip_to(min(self._at + _AHEAD_BYTES, self._sums.bytes))

    def _fill(self, out: Tensor, begin: int) -> None:
        """Read unchecked bytes from an offset on."""
        view = raw(out)
        done = 0
        while done < len(view):
            try:
                count = self._file.read_into(view[done:], begin + done)
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
            self._file.close()


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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, ValueError) and not isinstance(error, DamagedFileError):
                self.finish()
        finally:
            self.close()


def open_readers(
    paths: Sequence[Location], make: Callable[[int], ChecksummedReader]
) -> list[ChecksummedReader]:
    """Open several files. Those of a URL are opened at once, because each has to be asked for.

    Args:
        paths: the files.
        make: opens the file of a number.

    Raises:
        DamagedFileError: one of them is damaged; the others are closed.
    """
    if len(paths) < 2 or isinstance(paths[0], Path):
        opened: list[ChecksummedReader] = []
        try:
            opened += (make(number) for number in range(len(paths)))
        except BaseException:
            for reader in opened:
                reader.close()
            raise
        return opened
    with ThreadPoolExecutor(min(len(paths), _OPENED_AT_ONCE), "checkpoint opening") as pool:
        futures = [pool.submit(make, number) for number in range(len(paths))]
    failed = next((error for of in futures if (error := of.exception()) is not None), None)
    if failed is None:
        return [future.result() for future in futures]
    for future in futures:
        if future.exception() is None:
            future.result().close()
    raise failed


def read_tensors(path: Location, sums: FileChecksums) -> dict[str, Tensor]:
    """Return all tensors of a file, by name.

    Raises:
        DamagedFileError: it is missing or damaged.
    """
    reader = ChecksummedReader(path, sums)
    try:
        tensors = {}
        for name, section in reader.tensors.items():
            tensors[name] = torch.empty(section.shape, dtype=section.dtype, device="cpu")
            reader.read(name, 0, tensors[name])
        reader.finish()
    finally:
        reader.close()
    return tensors


def check_file(path: Location, sums: FileChecksums) -> None:
    """Check a whole file.

    Raises:
        DamagedFileError: it is missing or damaged.
    """
    reader = ChecksummedReader(path, sums)
    try:
        reader.skip_to_end()
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
    "open_readers",
    "read_tensors",
    "space_errors",
    "write_file",
]
