"""Where the batches of a delta log are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class DeltaSink(Protocol):
    """Keeps the batches of one rank: bytes with ascending numbers.

    A directory is built in. A sink of one's own, such as a topic of a message queue, has these four
    methods. Batches are readable by themselves: a sink need not look into them. A sink that can
    read a part of a batch should be an :class:`EndingSink`, too.
    """

    def append(self, data: memoryview, sequence: int) -> None:
        """Keeps a batch after all others; a thread of the log calls it.

        When it returns, the batch is there to stay. When it raises, the batch is not there, or
        :meth:`drop_after` can take it away: the log then publishes its changes again, with the
        same number.

        Args:
            data: the batch, uint8; its memory is the log's, and is reused afterwards.
            sequence: its number, one more than that of the batch before.
        """
        ...

    def read(self, from_sequence: int) -> Iterator[bytes | bytearray | memoryview]:
        """The batches that are there, in the order of their numbers; ends where there are no more.

        It may be called by other processes than the one that appends, while that goes on.

        Args:
            from_sequence: number of the first batch that is wanted. Where it is not there any more,
                later ones are given, and where it is not there yet, none.
        """
        ...

    def truncate(self, before: int) -> None:
        """Drops batches at the beginning, of which a sink may keep some; the last one stays.

        Args:
            before: batches from this number on stay.
        """
        ...

    def drop_after(self, sequence: int) -> None:
        """Takes batches at the end away, all of them: what was rolled back must not come again.

        Args:
            sequence: batches up to this number stay.
        """
        ...


@runtime_checkable
class EndingSink(Protocol):
    """A sink that gives the end of a batch without the rest of it.

    Followers that find no new batch look whether the one that they read last is there, to notice a
    rollback. Of a sink without this method they read that batch as a whole each time.
    """

    def ending(self, sequence: int) -> bytes | bytearray | memoryview | None:
        """The last 48 bytes of a batch, or None where it is not there.

        Args:
            sequence: number of the batch.
        """
        ...


__all__ = ["DeltaSink", "EndingSink"]
