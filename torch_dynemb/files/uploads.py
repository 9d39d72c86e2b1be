"""Writer of the files of a checkpoint to a URL: several at once, with bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import BoundedSemaphore
from typing import Any, BinaryIO, NamedTuple

from torch_dynemb.files.disk import MANIFEST, Disk
from torch_dynemb.files.locations import Location, Url
from torch_dynemb.process.interrupts import defer_signals

PART_BYTES = 16 << 20  # of a file in one request, and of the parts of a larger one
_AT_ONCE = 3  # parts in flight, beside the one that is filled: 64 MiB


class DiskLimits(NamedTuple):
    """Sizes of files.

    Attributes:
        file_bytes: most bytes of a file of rows.
        block_bytes: bytes of a block with a checksum; None: the default.
        open_files: most files that are written at once.
    """

    file_bytes: int
    block_bytes: int | None
    open_files: int


_LOCAL_LIMITS = DiskLimits(2 << 30, None, 256)


class _Upload:
    """A file that is written.

    Attributes:
        url: the file.
        part: bytes that are not in flight.
        sent: number of bytes before them.
        scattered: whether bytes have not come from front to back: then all of them stay in memory.
        stream: open upload in parts; None as long as the file may fit into one part.
        last: the last part in flight.
        ended: whether all bytes are written.
    """

    def __init__(self, url: Url) -> None:
        self.url, self.part, self.sent, self.scattered = url, bytearray(), 0, False
        self.stream: Any = None
        self.last: Future[None] | None = None
        self.ended = False


class UrlDisk(Disk):
    """The file system of a URL, with the methods of a disk.

    Files of up to 16 MiB are uploaded by one request, when they end; larger ones in parts of that
    size, in order. Three files or parts are in flight at once, and a fourth one is filled: 64 MiB.
    """

    file_bytes = PART_BYTES - (1 << 20)  # of rows; with the header, a file fits into one request
    block_bytes = 1 << 20
    open_files = 8

    def __init__(self) -> None:
        self._files: dict[int, _Upload] = {}
        self._numbers = itertools.count()
        self._room = BoundedSemaphore(_AT_ONCE)
        self._pool: ThreadPoolExecutor | None = None

    def make_folder(self, path: Location) -> None:
        _url(path).store.make_folder(str(path))

    def create(self, path: Location) -> int:
        number = next(self._numbers)
        self._files[number] = _Upload(_url(path))
        return number

    def write_at(self, file: int, data: memoryview, begin: int) -> int:
        """Write some bytes. From front to back, parts are sent as they fill."""
        upload = self._files[file]
        at = begin - upload.sent
        upload.scattered |= at != len(upload.part)
        if not upload.scattered:
            if at >= PART_BYTES:
                self._send_part(upload)
                at = 0
            data = data[: PART_BYTES - at]
        elif at > len(upload.part):
            upload.part.extend(bytes(at - len(upload.part)))
        upload.part[at : at + len(data)] = data
        return len(data)

    def begin_sync(self, file: int, begin: int, size: int) -> None:
        """Do nothing: a part is sent once it is full."""

    def end(self, file: int) -> None:
        """Start sending what is left of a file."""
        upload = self._files[file]
        upload.ended = True
        if upload.stream is not None:
            self._send_part(upload)
            self._send(upload, upload.stream.close)
            return
        store, url, data = upload.url.store, str(upload.url), upload.part
        upload.part = bytearray()
        self._send(upload, lambda: store.put(url, data))

    def sync(self, file: int) -> None:
        """Wait until a file is in the store.

        Raises:
            OSError: the store has failed.
        """
        last = self._files[file].last
        if last is not None:
            last.result()

    def close(self, file: int) -> None:
        """Give up a file that has not ended. One that was sent stays."""
        upload = self._files.pop(file)
        if upload.last is not None:
            with suppress(Exception):
                upload.last.result()
        if upload.stream is not None and not upload.ended:
            with suppress(Exception):
                getattr(upload.stream, "discard", upload.stream.close)()
        if not self._files and self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def sync_folder(self, path: Location) -> None:
        """Do nothing: a name is in the store with its file."""

    def remove(self, path: Location) -> None:
        store = _url(path).store
        with suppress(OSError):
            # first, so that a part of it is never mistaken for a checkpoint
            store.remove_files([str(path / MANIFEST)])
            store.remove(str(path))

    def _send_part(self, upload: _Upload) -> None:
        if upload.stream is None:
            upload.stream = upload.url.store.stream(str(upload.url), PART_BYTES)
        stream, data = upload.stream, upload.part
        upload.part = bytearray()
        upload.sent += len(data)
        self._send(upload, lambda: stream.write(data))

    def _send(self, upload: _Upload, work: Callable[[], object]) -> None:
        """Do work in a thread, after earlier work for the file. Wait for room first.

        Raises:
            OSError: earlier work for the file has failed.
        """
        before = upload.last
        if before is not None and before.done():
            before.result()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AT_ONCE, "checkpoint uploads")
        self._room.acquire()

        def run() -> None:
            try:
                if before is not None:
                    before.result()  # it began earlier
                work()
            finally:
                self._room.release()

        with defer_signals():  # Ctrl-C may come once the thread has the room
            try:
                upload.last = self._pool.submit(run)
            except BaseException:
                self._room.release()
                raise


def disk_of(path: Location, local: Disk) -> Disk:
    """Return the file system of a place.

    Args:
        path: the place.
        local: file system of local paths.
    """
    return UrlDisk() if isinstance(path, Url) else local


def limits_of(disk: Disk) -> DiskLimits:
    """Return the sizes of files on a disk."""
    if isinstance(disk, UrlDisk):
        return DiskLimits(disk.file_bytes, disk.block_bytes, disk.open_files)
    return _LOCAL_LIMITS


def new_file(path: Location) -> BinaryIO:
    """Create a file that is written from front to back.

    Args:
        path: the file, which must not exist yet.

    Raises:
        OSError: it cannot be created.
    """
    if isinstance(path, Url):
        stream: BinaryIO = path.store.stream(str(path), PART_BYTES)
        return stream
    return path.open("xb")


def _url(path: Location) -> Url:
    assert isinstance(path, Url)
    return path


__all__ = ["PART_BYTES", "DiskLimits", "UrlDisk", "disk_of", "limits_of", "new_file"]
