"""Segment: a file of consecutive batches, which may end in a torn tail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch_dynemb.changes.batch import (
    COMMIT_BYTES,
    HEAD_BYTES,
    MAGIC,
    BrokenBatchError,
    Head,
    as_tensor,
    decoded,
    head_of,
)
from torch_dynemb.errors import DamagedFileError, UnsupportedFormatError

_SECTOR = 512  # smallest unit that a disk writes atomically
_SEARCHED_AT_ONCE = 1 << 20


class Placed(NamedTuple):
    """Place of a batch in a file.

    Attributes:
        head: head of the batch.
        begin, end: its bytes in the file.
    """

    head: Head
    begin: int
    end: int


class Segment:
    """A file of batches, for reading.

    The commit of a batch is written after everything before it is on the disk. So a batch with an
    intact commit is complete, or else damaged. What follows the last complete batch is a torn tail
    that was never committed: it ends too early, or has sectors of zeros that were never written.
    Anything else is damage.

    Args:
        path: the file.
        last: whether this is the last segment; only that may have a torn tail.
    """

    def __init__(self, path: Path, *, last: bool) -> None:
        self.path, self._last = path, last
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def heads(self, begin: int = 0) -> Iterator[Placed]:
        """Iterate over the batches without reading their records. The last one may lack its commit.

        Args:
            begin: offset of the first batch.

        Raises:
            DamagedFileError: there is something other than a batch or a torn tail.
            UnsupportedFormatError: a batch has another format version.
        """
        size = os.fstat(self._file).st_size
        while True:
            head = self._head(begin, size)
            if head is None:
                return
            yield Placed(head, begin, begin + head.bytes)
            begin += head.bytes

    def holds(self, place: Placed) -> bool:
        """Return whether a batch that was read before is still there."""
        text = self._bytes(place.begin, HEAD_BYTES)
        try:
            return len(text) == HEAD_BYTES and head_of(text) == place.head
        except ValueError:
            return False

    def commit(self, place: Placed) -> bytes:
        """Return the last COMMIT_BYTES of a batch; fewer at the end of the file.

        Args:
            place: place of the batch.
        """
        return bytes(self._bytes(place.end - COMMIT_BYTES, COMMIT_BYTES))

    def read(self, place: Placed) -> bytearray | None:
        """Read a batch.

        Args:
            place: place of the batch.

        Returns:
            The committed batch; None if it was not committed.

        Raises:
            DamagedFileError: it was committed, and is damaged.
        """
        data = self._bytes(place.begin, place.head.bytes)
        try:
            decoded(as_tensor(data))
        except BrokenBatchError as error:
            size = os.fstat(self._file).st_size
            commit = place.end - COMMIT_BYTES
            at_end = self._last and place.end >= size
            unwritten = _lacks_sectors(data[-COMMIT_BYTES:], commit)
            if at_end and not error.commit and (unwritten or len(data) < place.head.bytes):
                return None
            raise self._damaged(place.begin, str(error)) from error
        return data

    def _head(self, begin: int, size: int) -> Head | None:
        """Return the head of the next batch; None at the end, or if it is not fully written."""
        text = self._bytes(begin, min(HEAD_BYTES, max(0, size - begin)))
        if len(text) < HEAD_BYTES:
            if len(text) > 0 and not self._last:
                raise self._damaged(begin, "it ends within a batch, but another segment follows")
            return None
        try:
            head = head_of(text)
        except UnsupportedFormatError as error:
            raise UnsupportedFormatError(
                f"{self.path}: byte {begin}: {error}: read the log with the version that wrote it, "
                "or publish to a new directory",
                path=self.path,
            ) from error
        except ValueError as error:
            raise self._damaged(begin, str(error)) from error
        if head is None:
            if self._last and _lacks_sectors(text, begin) and not self._has_head(begin + 1, size):
                return None
            raise self._damaged(begin, "expected the head of a batch")
        if size - begin >= head.bytes:
            return head
        if not self._last:
            raise self._damaged(begin, "it ends within a batch, but another segment follows")
        return None

    def _has_head(self, begin: int, size: int) -> bool:
        """Return whether a batch begins in the rest of the file: then what precedes it was
        committed.
        """
        overlap = b""
        while begin < size:
            text = overlap + bytes(self._bytes(begin, min(_SEARCHED_AT_ONCE, size - begin)))
            found = text.find(MAGIC)
            while found >= 0:
                at = begin - len(overlap) + found
                try:
                    if head_of(self._bytes(at, HEAD_BYTES)) is not None:
                        return True
                except ValueError:  # the head of another version
                    return True
                found = text.find(MAGIC, found + 1)
            begin += len(text) - len(overlap)
            overlap = text[-len(MAGIC) :]
        return False

    def _bytes(self, begin: int, size: int) -> bytearray:
        """Read bytes of the file; fewer at its end."""
        data, done = bytearray(size), 0
        with memoryview(data) as view:
            while done < size:
                count = os.preadv(self._file, [view[done:]], begin + done)
                if count == 0:
                    break
                done += count
        return data if done == size else data[:done]

    def _damaged(self, begin: int, reason: str) -> DamagedFileError:
        return DamagedFileError(
            f"{self.path}: byte {begin}: {reason}: the delta log is damaged. Followers need a new "
            "base; DeltaLog.rollback() to an earlier sequence number removes the damaged batch",
            path=self.path,
        )


def _lacks_sectors(data: bytes | bytearray, begin: int) -> bool:
    """Return whether a sector's part of some bytes is all zeros."""
    first = -begin % _SECTOR
    parts = [data[:first], *(data[at : at + _SECTOR] for at in range(first, len(data), _SECTOR))]
    return any(part and not any(part) for part in parts)


__all__ = ["Placed", "Segment"]
