"""What the cache and the store of tiered tables have done."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class StorageStats:
    """What the cache and the store of a group have done, all tiered tables together.

    Attributes:
        slots: rows that the cache is to have; a step that needs more gets more.
        cached: rows in it.
        hits: ids of lookups whose row was in memory, every occurrence counted.
        misses: rows that lookups had to wait for, or that were new.
        prefetched: rows that prefetches have brought.
        evicted: rows that left memory for others.
        write_backs: rows that went to the store, because they had changed.
        reads: rows that were read from files.
        bytes_read, bytes_written: of files, what collection reads and writes included.
        collected: rows that were copied so that the space of old ones could be used again.
        stored: rows in files.
        disk_bytes: that files take.
        queued: jobs of the storage thread that are not done, at most one for each call.
        most_queued: the most there ever were.
        waited: seconds that calls have waited for the thread.

    What an :class:`torch_dynemb.ExternalStore` reads and writes is not counted: it stays 0.
    """

    slots: int
    cached: int
    hits: int
    misses: int
    prefetched: int
    evicted: int
    write_backs: int
    reads: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    collected: int = 0
    stored: int = 0
    disk_bytes: int = 0
    queued: int = 0
    most_queued: int = 0
    waited: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """All figures by their names, as loggers take them."""
        return asdict(self)


__all__ = ["StorageStats"]
