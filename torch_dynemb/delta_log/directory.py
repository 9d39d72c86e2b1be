"""Delta log in a directory: files of batches, on the disk once they are committed."""

from __future__ import annotations

import fcntl
import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from os import PathLike
from pathlib import Path

from torch_dynemb.argument_checks import integer
from torch_dynemb.changes.batch import COMMIT_BYTES, segment_file
from torch_dynemb.delta_log.segment import Placed, Segment
from torch_dynemb.errors import InUseError
from torch_dynemb.files.checksummed_files import space_errors
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import checked_path

_DISK = Disk()
_NAME = re.compile(r"(\d{20})\.delta")
_LOCK = "lock"


class DirectorySink:
    """Batches of one rank in files of a directory; see :class:`DeltaSink`.

    A batch is on the disk before :meth:`append` returns. The directory has one writer, which holds
    a lock of the file system. The lock ends with its process; a forked child, such as a DataLoader
    worker, does not hold it. Any number of processes can read.

    Args:
        path: the directory; the first batch creates it.
        segment_bytes: size at which a new file begins; old files are dropped as a whole.

    Raises:
        TypeError: ``path`` is not a path, or ``segment_bytes`` not an int.
        ValueError: ``segment_bytes`` is less than 1.

    Example:
        >>> import tempfile, torch_dynemb as td
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sink = td.delta_log.DirectorySink(folder + "/log", segment_bytes=1 << 20)
        ...     print(list(sink.read(1)))
        []
    """

    def __init__(self, path: str | PathLike[str], *, segment_bytes: int = 64 << 20) -> None:
        self.path = checked_path("DirectorySink", path)
        self.segment_bytes = integer("DirectorySink: segment_bytes", segment_bytes, least=1)
        self._disk = _DISK
        self._lock: int | None = None
        self._end: tuple[Path, int] | None = None  # place of the next batch
        self._met: tuple[Path, Placed] | None = None  # the last batch that was read

    # -- writing -------------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock the directory for writing until :meth:`close`, and cut off a torn tail.

        Raises:
            InUseError: it has another writer.
            DamagedFileError: the last batch is damaged.
            OSError: the disk fails.
        """
        if self._lock is not None:
            return
        self._make_folders(self.path)
        with _forking:
            file = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                writer = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(file)
                raise InUseError(
                    f"DeltaLog: {self.path} has a writer, process {writer}: close that log, or "
                    "take another directory",
                    path=self.path,
                ) from error
            except BaseException:  # a file system without locks
                os.close(file)
                raise
            self._lock = file
            _locked.add(self)
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
        except BaseException:  # the disk is full
            self.close()
            raise

    def close(self) -> None:
        """Stop being the writer."""
        if self._lock is not None:
            with suppress(OSError):  # unlocks at once, even if a forked child has the file open
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._close_lock()

    def _close_lock(self) -> None:
        """Close the file of the lock. In a forked child, the parent keeps its lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock, self._end = None, None
            _locked.discard(self)

    def append(self, data: memoryview, sequence: int) -> None:
        """Append a batch; see :meth:`DeltaSink.append`.

        Args:
            data: the batch, uint8.
            sequence: number of the batch.

        Raises:
            InUseError: the directory has another writer.
            OSError: the disk is full or fails; the batch is not stored.
        """
        self.lock()
        path, begin = self._next_place(sequence)
        self._end = None  # until the write succeeds
        with space_errors(path):
            if begin == 0:
                os.close(self._disk.create(path))
                self._disk.sync_folder(self.path)
            file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                # the commit is written last: it proves that everything before it is on the disk
                self._write(file, data[:-COMMIT_BYTES], begin)
                self._disk.sync(file)
                self._write(file, data[-COMMIT_BYTES:], begin + len(data) - COMMIT_BYTES)
                self._disk.sync(file)
            except BaseException:
                with suppress(OSError):  # leftovers are a torn tail, which is cut off later
                    os.ftruncate(file, begin)
                raise
            finally:
                os.close(file)
        self._end = path, begin + len(data)

    def truncate(self, before: int) -> None:
        """Drop files with only earlier batches; the last file stays.

        Args:
            before: number of the first batch that must stay.

        Raises:
            OSError: the disk fails.
        """
        segments = self._segments()
        for (_, path), (following, _) in pairwise(segments):
            if following <= before:
                path.unlink()
        self._disk.sync_folder(self.path)

    def drop_after(self, sequence: int) -> None:
        """Remove batches at the end.

        Args:
            sequence: number of the last batch that stays.

        Raises:
            DamagedFileError: a batch that stays is damaged.
            InUseError: the directory has another writer.
            OSError: the disk fails.
        """
        self.lock()
        self._end = None
        for first, path in reversed(self._segments()):
            if first > sequence:
                path.unlink()
                continue
            end = 0
            with Segment(path, last=True) as segment:
                for place in segment.heads():
                    if place.head.sequence > sequence:
                        break
                    end = place.end
                    if place.head.sequence == sequence:
                        break  # later batches may be damaged
            self._cut(path, end)
            break
        self._disk.sync_folder(self.path)

    def _next_place(self, sequence: int) -> tuple[Path, int]:
        """Return file and offset for a batch. Cuts off a torn tail."""
        new = self.path / segment_file(sequence)
        if self._end is None:
            segments = self._segments()
            if not segments:
                return new, 0
            path, end = segments[-1][1], 0
            with Segment(path, last=True) as segment:
                for place in segment.heads():
                    if segment.read(place) is None:
                        break
                    end = place.end
            self._cut(path, end)
            if end == 0:
                path.unlink()  # its name may have another number
                return new, 0
            self._end = path, end
        return (new, 0) if self._end[1] >= self.segment_bytes else self._end

    def _cut(self, path: Path, end: int) -> None:
        if path.stat().st_size > end:
            os.truncate(path, end)
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._disk.sync(file)
            finally:
                os.close(file)

    def _write(self, file: int, data: memoryview, begin: int) -> None:
        done = 0
        while done < len(data):
            done += self._disk.write_at(file, data[done:], begin + done)

    def _make_folders(self, path: Path) -> None:
        if not path.is_dir():
            self._make_folders(path.parent)
            self._disk.make_folder(path)
            self._disk.sync_folder(path.parent)

    # -- reading -------------------------------------------------------------------------------

    def read(self, from_sequence: int) -> Iterator[bytearray]:
        """Iterate over the batches; see :meth:`DeltaSink.read`.

        Args:
            from_sequence: number of the first batch.

        Raises:
            DamagedFileError: a batch is damaged.
            OSError: the disk fails.
        """
        segments = self._segments()
        begins = [number for number, (first, _) in enumerate(segments) if first <= from_sequence]
        start = begins[-1] if begins else 0
        for number in range(start, len(segments)):
            path = segments[number][1]
            try:
                segment = Segment(path, last=number == len(segments) - 1)
            except FileNotFoundError:
                return  # dropped meanwhile: the next read finds only later batches
            with segment:
                for place in segment.heads(self._known_begin(path, segment, from_sequence)):
                    if place.head.sequence < from_sequence:
                        continue
                    data = segment.read(place)
                    if data is None:
                        return
                    self._met = path, place
                    yield data

    def ending(self, sequence: int) -> bytes | None:
        """Return the end of a batch; see :meth:`EndingSink.ending`.

        Args:
            sequence: number of the batch.

        Raises:
            DamagedFileError: an earlier batch is damaged.
            OSError: the disk fails.
        """
        segments = [of for of in self._segments() if of[0] <= sequence]
        if not segments:
            return None
        path = segments[-1][1]
        try:
            segment = Segment(path, last=True)
        except FileNotFoundError:
            return None
        with segment:
            for place in segment.heads(self._known_begin(path, segment, sequence + 1)):
                if place.head.sequence == sequence:
                    return segment.commit(place)
        return None

    def _known_begin(self, path: Path, segment: Segment, from_sequence: int) -> int:
        """Return the offset from which to search: that of the last batch read, if it is still
        there.
        """
        if self._met is None or self._met[0] != path:
            return 0
        place = self._met[1]
        if place.head.sequence >= from_sequence:
            return 0
        return place.begin if segment.holds(place) else 0

    def _segments(self) -> list[tuple[int, Path]]:
        """List the number of the first batch and the path of every file, ascending."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        found = (_NAME.fullmatch(name) for name in names)
        return sorted((int(match[1]), self.path / match[0]) for match in found if match)


# A lock belongs to an open file. A forked child inherits it, and would keep it after its parent's
# death.
_locked: weakref.WeakSet[DirectorySink] = weakref.WeakSet()
_forking = threading.RLock()  # prevents a fork between locking and adding to _locked


def _close_in_child() -> None:
    try:
        for sink in list(_locked):
            sink._close_lock()
    finally:
        _forking.release()


os.register_at_fork(
    before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child
)


__all__ = ["DirectorySink"]
