"""Storage of the batches of a delta log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class DeltaSink(Protocol):
    """Storage of the batches of one rank: bytes with ascending numbers.

    A directory is built in. Your own sink, such as a topic of a message queue, has these four
    methods. Batches are self-contained: a sink need not look into them. A sink that can read part
    of a batch should also be an :class:`EndingSink`.
    """

    def append(self, data: memoryview, sequence: int) -> None:
        """Append a batch after all others. A thread of the log calls it.

        When it returns, the batch is durable. If it raises, the batch may be stored, such as if an
        answer was lost: the log reads the batch of this number, and keeps it or calls
        :meth:`drop_after`. Then it publishes the changes again.

        Args:
            data: the batch, uint8; the log owns the memory and reuses it afterwards.
            sequence: number of the batch, one more than that of the batch before.
        """
        ...

    def read(self, from_sequence: int) -> Iterator[bytes | bytearray | memoryview]:
        """Iterate over the stored batches in the order of their numbers.

        Other processes may call it, also during an append.

        Args:
            from_sequence: number of the first batch. If it was dropped, later ones are returned; if
                it does not exist yet, none.
        """
        ...

    def truncate(self, before: int) -> None:
        """Drop batches at the beginning. A sink may keep some of them, and keeps the last one.

        Args:
            before: number of the first batch that must stay.
        """
        ...

    def drop_after(self, sequence: int) -> None:
        """Remove all batches at the end: rolled-back batches must not come back.

        Args:
            sequence: number of the last batch that stays.
        """
        ...


@runtime_checkable
class EndingSink(Protocol):
    """A sink that can return the end of a batch without the whole batch.

    Followers without a new batch check that the last one they read still exists, to notice a
    rollback. From a sink without this method they read that batch as a whole each time.
    """

    def ending(self, sequence: int) -> bytes | bytearray | memoryview | None:
        """Return the last 48 bytes of a batch, or None if it does not exist.

        Args:
            sequence: number of the batch.
        """
        ...


@runtime_checkable
class LockingSink(Protocol):
    """A sink with one writer at a time. Without these methods, programs must take care of that."""

    def lock(self) -> None:
        """Lock the sink for this writer. The log calls it when it is attached or rolled back.

        Raises:
            InUseError: the sink has another writer, and waits for it to close.
        """
        ...

    def close(self) -> None:
        """Stop being the writer."""
        ...


__all__ = ["DeltaSink", "EndingSink", "LockingSink"]
