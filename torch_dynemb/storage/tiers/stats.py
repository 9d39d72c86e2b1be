"""Counters of the cache and the store of tiered tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from torch_dynemb.ops.columns import Tier


@dataclass(frozen=True, kw_only=True)
class StorageStats:
    """Counters of the cache and the store of a group, for all tiered tables together.

    Attributes:
        slots: intended size of the cache in rows; a step that needs more gets more. This and the
            following are of the cache on the device of the tables.
        cached: rows in the cache.
        hits: ids of lookups with the row in memory; every occurrence counts.
        misses: rows that lookups waited for, or that were new.
        in_place: ids of lookups with the row in host memory, where a ``HostStore`` had no slot for
            it; every occurrence counts.
        prefetched: rows loaded by prefetches.
        evicted: rows that left memory for others.
        write_backs: changed rows written to the store, or back to host memory.
        host_slots, host_cached, host_hits, host_misses: of the cache in host memory, if a GPU has
            another above it (``device_cache=``). Hits and misses count rows that move between both.
        host_evicted, host_write_backs: of the same cache.
        reads: rows read from files, or copied from host memory into the cache.
        bytes_read, bytes_written: of files, garbage collection included, or of host memory.
        collected: rows copied by garbage collection.
        stored: rows in files.
        disk_bytes: size of the files.
        queued: pending jobs of the storage thread, at most one for each call.
        most_queued: maximum of ``queued`` so far.
        waited: seconds that calls have waited for the thread.

    Reads and writes of a :class:`torch_dynemb.ExternalStore` are not counted and stay 0.
    """

    slots: int
    cached: int
    hits: int
    misses: int
    prefetched: int
    evicted: int
    write_backs: int
    in_place: int = 0
    host_slots: int = 0
    host_cached: int = 0
    host_hits: int = 0
    host_misses: int = 0
    host_evicted: int = 0
    host_write_backs: int = 0
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
        """Return all figures by name, for loggers."""
        return asdict(self)


def cache_counts(count: Callable[[Tier], int]) -> dict[str, int]:
    """Return what a cache counts, by fields of :class:`StorageStats`.

    Args:
        count: returns a column of the clock, summed over the slabs of the cache.
    """
    return {
        "slots": count(Tier.LIMIT),
        "cached": count(Tier.USED) - count(Tier.FREE_COUNT),
        "hits": count(Tier.HITS),
        "misses": count(Tier.MISSES),
        "prefetched": count(Tier.PREFETCHED),
        "evicted": count(Tier.EVICTED),
        "write_backs": count(Tier.WRITTEN),
    }


__all__ = ["StorageStats", "cache_counts"]
