"""A file of batches that follow each other, and where it ends: a torn tail is none of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from torch_dynemb.checkpoint.delta_log.batch import (
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

_SECTOR = 512  # what a disk writes as a whole
_SEARCHED_AT_ONCE = 1 << 20


class Placed(NamedTuple):
    """A batch in a file.

    Attributes:
        head: of the batch.
        begin, end: its bytes in the file.
    """

    head: Head
    begin: int
    end: int


class Segment:
    """A file of batches, for reading.

    A batch is written in two parts, the commit after the rest is on the disk. So a batch whose
    commit is whole is whole, or else it is damaged, and what follows the last whole batch is a tail
    that was never committed: it ends too early, or lacks sectors that were never written, which
    then are zeros. Anything else is damage.

    Args:
        path: of the file.
        last: no segment follows it; only the last one may have a torn tail.
    """

    def __init__(self, path: Path, *, last: bool) -> None:
        self.path, self._last = path, last
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def heads(self, begin: int = 0) -> Iterator[Placed]:
        """The batches, without a look at their records; the last one may be torn in its commit.

        Args:
            begin: of the first of them.

        Raises:
            DamagedFileError: something else than a batch or a torn tail is there.
            UnsupportedFormatError: a batch of another format version is there.
        """
        size = os.fstat(self._file).st_size
        while True:
            head = self._head(begin, size)
            if head is None:
                return
            yield Placed(head, begin, begin + head.bytes)
            begin += head.bytes

    def holds(self, place: Placed) -> bool:
        """Whether a batch that was read before is still there."""
        text = self._bytes(place.begin, HEAD_BYTES)
        try:
            return len(text) == HEAD_BYTES and head_of(text) == place.head
        except ValueError:
            return False

    def commit(self, place: Placed) -> bytes:
        """The last COMMIT_BYTES of a batch, fewer where the file ends.

        Args:
            place: of the batch.
        """
        return bytes(self._bytes(place.end - COMMIT_BYTES, COMMIT_BYTES))

    def read(self, place: Placed) -> bytearray | None:
        """A batch.

        Args:
            place: of it.

        Returns:
            What was committed; None: it was not.

        Raises:
            DamagedFileError: it was, and is no longer what it was.
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
        """The head of the next batch; None: there is none, or it was not written to its end."""
        text = self._bytes(begin, min(HEAD_BYTES, max(0, size - begin)))
        if len(text) < HEAD_BYTES:
            if len(text) > 0 and not self._last:
                raise self._damaged(begin, "it ends in a batch, and another segment follows")
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
            raise self._damaged(begin, "there is no head of a batch")
        if size - begin >= head.bytes:
            return head
        if not self._last:
            raise self._damaged(begin, "it ends in a batch, and another segment follows")
        return None

    def _has_head(self, begin: int, size: int) -> bool:
        """Whether a batch begins somewhere: then what is before it had been committed."""
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
        """Bytes of the file, fewer where it ends."""
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
            "base; DeltaLog.rollback() to a sequence number before takes the damaged batch away",
            path=self.path,
        )


def _lacks_sectors(data: bytes | bytearray, begin: int) -> bool:
    """Whether a part of some bytes, as a disk writes them, are zeros."""
    first = -begin % _SECTOR
    parts = [data[:first], *(data[at : at + _SECTOR] for at in range(first, len(data), _SECTOR))]
    return any(part and not any(part) for part in parts)


__all__ = ["Placed", "Segment"]
