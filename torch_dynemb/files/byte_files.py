"""Files that are read in ranges: of the local disk, and of a URL."""

from __future__ import annotations

import itertools
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Protocol

from torch_dynemb.errors import DamagedFileError
from torch_dynemb.files.locations import Location, Url

_CACHE_BYTES = 64 << 20  # blocks that a process keeps
_MOST_UNIT = 8 << 20  # largest block
_RANGE_BYTES = 2 << 20  # largest range that is requested
_REQUESTS = 16  # at once


class ByteFile(Protocol):
    """A file that is read in ranges."""

    def expect(self, begin: int, size: int) -> None:
        """Prepare for reads of a range."""
        ...

    def read_into(self, view: memoryview, begin: int) -> int:
        """Read bytes from an offset on. Return their number; 0 at the end of the file."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def open_file(path: Location, size: int, block_bytes: int) -> ByteFile:
    """Open a file for reading.

    Args:
        path: the file.
        size: expected size.
        block_bytes: size of the blocks that its reader checks.

    Raises:
        DamagedFileError: it is missing, or has another size. A file of a URL reports it when it is
            read.
    """
    return LocalFile(path, size) if isinstance(path, Path) else _UrlFile(path, size, block_bytes)


class LocalFile:
    """A file of the local disk.

    Args:
        path: the file.
        size: expected size.
    """

    def __init__(self, path: Path, size: int) -> None:
        try:
            # O_NONBLOCK: return at once if the path is a FIFO without a writer
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            raise _missing(path) from None
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedFileError(f"{path}: it is not a regular file", path=path)
            if status.st_size != size:
                raise _of_size(path, f"{status.st_size}", size)
        except BaseException:
            self.close()
            raise

    def expect(self, begin: int, size: int) -> None:
        """Do nothing: the kernel reads ahead."""

    def read_into(self, view: memoryview, begin: int) -> int:
        """Read bytes; see :class:`ByteFile`."""
        return os.preadv(self._file, [view], begin)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class _UrlFile:
    """A file of a URL, of which blocks are cached: a block is requested once."""

    def __init__(self, url: Url, size: int, block_bytes: int) -> None:
        self._url, self._size = url, size
        self._unit = min(block_bytes, _MOST_UNIT)
        self._number = next(_numbers)

    def expect(self, begin: int, size: int) -> None:
        """Request the blocks of a range, several at once."""
        end = min(begin + min(size, _CACHE_BYTES // 2), self._size)
        blocks = range(begin // self._unit, -(-end // self._unit))
        missing = [block for block in blocks if _cache.get((self._number, block)) is None]
        if not missing:
            return
        pieces = {block: self._ranges(block) for block in missing}
        requests = [
            (block, _pool().submit(self._request, first, last))
            for block, ranges in pieces.items()
            for first, last in ranges
        ]
        for block, data in _joined(requests):
            _cache.put((self._number, block), data)

    def read_into(self, view: memoryview, begin: int) -> int:
        """Read bytes; see :class:`ByteFile`."""
        self.expect(begin, len(view))
        block, inside = divmod(begin, self._unit)
        data = _cache.get((self._number, block))
        if data is None:  # other files have taken its place
            first, last = block * self._unit, min((block + 1) * self._unit, self._size)
            data = self._request(first, last)
        piece = data[inside : inside + len(view)]
        view[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        """Drop the blocks."""
        _cache.drop(self._number)

    def _ranges(self, block: int) -> list[tuple[int, int]]:
        first, last = block * self._unit, min((block + 1) * self._unit, self._size)
        return [(at, min(at + _RANGE_BYTES, last)) for at in range(first, last, _RANGE_BYTES)]

    def _request(self, first: int, last: int) -> bytes:
        # a byte beyond the end shows a file that is too long
        end = last + (last == self._size)
        try:
            data = self._url.store.read(str(self._url), first, end)
        except FileNotFoundError:
            raise _missing(self._url) from None
        if len(data) < last - first:
            raise _of_size(self._url, f"{first + len(data)}", self._size)
        if len(data) > last - first:
            raise _of_size(self._url, f"more than {self._size}", self._size)
        return data


def _joined(requests: list[tuple[int, Future[bytes]]]) -> Iterator[tuple[int, bytes]]:
    """Join the ranges of each block, in the order of the requests."""
    try:
        for block, of_block in itertools.groupby(requests, key=lambda of: of[0]):
            yield block, b"".join([future.result() for _, future in of_block])
    finally:
        for _, future in requests:
            future.cancel()


class _Cache:
    """The blocks of files that were used last."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._blocks: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[int, int]) -> bytes | None:
        with self._lock:
            data = self._blocks.get(key)
            if data is not None:
                self._blocks.move_to_end(key)
            return data

    def put(self, key: tuple[int, int], data: bytes) -> None:
        with self._lock:
            self._bytes += len(data) - len(self._blocks.pop(key, b""))
            self._blocks[key] = data
            while self._bytes > _CACHE_BYTES:
                _, old = self._blocks.popitem(last=False)
                self._bytes -= len(old)

    def drop(self, number: int) -> None:
        with self._lock:
            for key in [key for key in self._blocks if key[0] == number]:
                self._bytes -= len(self._blocks.pop(key))


_numbers = itertools.count()
_cache = _Cache()
_pools: dict[int, ThreadPoolExecutor] = {}


def _pool() -> ThreadPoolExecutor:
    """Return the threads of this process: a forked child has none of its parent's."""
    pid = os.getpid()
    if pid not in _pools:
        _pools[pid] = ThreadPoolExecutor(_REQUESTS, "checkpoint requests")
    return _pools[pid]


def _missing(path: Location) -> DamagedFileError:
    return DamagedFileError(f"{path}: the file is missing", path=path)


def _of_size(path: Location, found: str, expected: int) -> DamagedFileError:
    return DamagedFileError(
        f"{path}: the file has {found} bytes, expected {expected}: it was cut off or written to",
        path=path,
    )


__all__ = ["ByteFile", "LocalFile", "open_file"]
