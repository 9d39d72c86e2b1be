"""The cache of tiered tables, and the store beneath it."""

from __future__ import annotations

import ctypes
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import DiskFullError
from torch_dynemb.ops.columns import (
    GENERATION_BITS,
    TIER_COLUMNS,
    Move,
    Slot,
    Tier,
    TierHead,
)
from torch_dynemb.ops.tensors import IndexTensors, RowTensors, TierTensors
from torch_dynemb.storage.tiers.cache_size import LEAST_SLOTS, CacheSize
from torch_dynemb.storage.tiers.stats import StorageStats

_GENERATIONS = (1 << GENERATION_BITS) - 1
_EPOCH_SHIFT = 32  # of the last use, in ``Slot.USE``
_DIRTY = 1 << GENERATION_BITS  # of a slot's marks
_SAVED_AT_ONCE = 1 << 14
# A cache gives memory back when it is larger than it should be by this part.
_SLACK = 16


class Records(NamedTuple):
    """Rows as stores keep them.

    Attributes:
        records: uint8 [n, bytes]; anything where there is no row.
        found: bool [n]: False for rows that were never written, which have their initial values.
    """

    records: Tensor
    found: Tensor


class Tiers(ABC):
    """The tiered slabs of a group: a cache of rows in memory, and a store.

    Args:
        cache: how many rows should be in memory.
        tensors: of the cache, empty.
        rows: of the group; those of tiered slabs have a row for each slot.
        cached: numbers of the tiered slabs.
        slot_bytes: by slab, memory of a slot with its row.
    """

    def __init__(
        self,
        cache: CacheSize,
        tensors: TierTensors,
        rows: RowTensors,
        cached: Sequence[int],
        slot_bytes: Sequence[int],
    ) -> None:
        self.tensors = tensors
        self.cached = tuple(cached)
        self._cache = cache
        self._rows = rows
        self._slot_bytes = slot_bytes
        # Reading a number of a tensor takes microseconds, and there are several in every step.
        words = ctypes.c_int64 * tensors.clock.numel()
        self._clock = words.from_address(tensors.clock.data_ptr())
        self._clock[TierHead.EPOCH] = 1
        self._warned = 0
        for slab in self.cached:
            self._clock[self._at(slab, Tier.SLOT_BYTES)] = slot_bytes[slab]
        self._set_limits([0] * len(slot_bytes))

    def _at(self, slab: int, column: Tier) -> int:
        return (1 + slab) * TIER_COLUMNS + column

    def holds(self, slab: int) -> bool:
        """Whether the rows of a slab are tiered.

        Args:
            slab: its number.
        """
        return slab in self.cached

    # -- lookups -------------------------------------------------------------------------------

    @abstractmethod
    def reserve_space(self, index: IndexTensors, batch: ops.LookupBatch) -> None:
        """Before ids are inserted for :meth:`stage`: sees that the store has room for its rows.

        Args:
            index, batch: as of :func:`torch_dynemb.ops.reserve_space_`.

        Raises:
            RuntimeError: it has not, or has failed; nothing has changed.
        """

    @abstractmethod
    def stage(self, staged: ops.StagedIds, *, trains: bool) -> Tensor:
        """Brings the rows of a lookup into memory; see :func:`torch_dynemb.ops.stage_`.

        Args:
            staged, trains: as there.
        """

    @abstractmethod
    def lookup(self, batch: ops.LookupBatch, handles: Tensor) -> Tensor:
        """A lookup that trains nothing; see :func:`torch_dynemb.ops.staged_lookup_`.

        Args:
            batch, handles: as there.
        """

    @abstractmethod
    def prefetch(self, staged: ops.StagedIds, *, ahead: int) -> None:
        """Begins to bring rows into memory; see :func:`torch_dynemb.ops.prefetch_`.

        Args:
            staged, ahead: as there.
        """

    # -- rows without a lookup -----------------------------------------------------------------

    def read(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        """Rows of ids, from the cache or the store; moves nothing.

        Args:
            slab: that is tiered.
            table: whose ids they are.
            ids: int64 [n].
            handles: int64 [n], of their rows, at least 0.
        """
        self.drain()
        slots, generations = self.tensors.slots[slab], self._rows.generations[slab]
        places = self.tensors.places[slab][handles >> GENERATION_BITS].long() - 1
        at = places.clamp(min=0)
        there = (places >= 0) & (slots[at, Slot.OWNER] == handles + 1)
        live = generations[at] == (slots[at, Slot.MARKS] & _GENERATIONS)
        found = there & live
        if bool(there.all()):
            return Records(ops.gather_records(self._rows, slab, at), found)
        stored = self._read_store(slab, table, ids, handles)
        if bool(there.any()):
            stored.records[there] = ops.gather_records(self._rows, slab, at[there])
        return Records(stored.records, torch.where(there, live, stored.found))

    def write(self, slab: int, table: int, ids: Tensor, handles: Tensor, records: Tensor) -> None:
        """Rows of ids, into their slots, or into the store where they have none.

        A row keeps its slot: gradients that are pending name it.

        Args:
            slab, table, ids, handles: as for :meth:`read`; ids are distinct.
            records: uint8 [n, bytes]; their headers are not read.
        """
        self.drain()
        slots = self.tensors.slots[slab]
        places = self.tensors.places[slab][handles >> GENERATION_BITS].long() - 1
        at = places.clamp(min=0)
        there = (places >= 0) & (slots[at, Slot.OWNER] == handles + 1)
        if not bool(there.all()):
            rest = ~there
            self._write_store(slab, table, ids[rest], handles[rest], records[rest])
            self._make_stale(slab, at[rest & (places >= 0)])
            ops.forget_rows_(self.tensors, slab, handles[rest])
        if bool(there.any()):
            at, records = at[there], records[there]
            marks = slots[at, Slot.MARKS]
            records.view(torch.int32)[:, 0] = (marks & _GENERATIONS).to(torch.int32)
            ops.scatter_records_(self._rows, slab, at, records)
            slots[at, Slot.MARKS] = marks | _DIRTY

    def _make_stale(self, slab: int, at: Tensor) -> None:
        """Has gradients that name slots be dropped, as those of rows with a new owner are."""
        slots = self.tensors.slots[slab]
        marks = slots[at, Slot.MARKS]
        following = ((marks & _GENERATIONS) % _GENERATIONS) + 1  # 0 is of no row
        slots[at, Slot.MARKS] = (marks & ~_GENERATIONS) | following
        self._rows.generations[slab][at] = following.to(torch.int32)

    @abstractmethod
    def _read_store(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records: ...

    @abstractmethod
    def _write_store(
        self, slab: int, table: int, ids: Tensor, handles: Tensor, records: Tensor
    ) -> None: ...

    @abstractmethod
    def _move(self, moves: Tensor) -> None:
        """Begins to move rows between slots and the store; see ``columns.Move``."""

    @abstractmethod
    def drain(self) -> None:
        """Waits until everything has moved.

        Raises:
            RuntimeError: something could not be read or written.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises RuntimeError if something could not be read or written; waits for nothing."""

    def drop(self, slab: int, handles: Tensor) -> None:
        """Has rows that nobody owns any more leave the cache without being saved.

        Those of this step's lookups keep their slots until it ends, since gradients may come.

        Args:
            slab: that is tiered.
            handles: int64 [n], that the rows had.
        """
        slots = self.tensors.slots[slab]
        at = self.tensors.places[slab][handles >> GENERATION_BITS].long() - 1
        last = slots[at.clamp(min=0), Slot.USE] >> _EPOCH_SHIFT
        in_use = (at >= 0) & ((last - self.epoch).to(torch.int32) >= 0)
        slots[at[in_use], Slot.MARKS] &= ~_DIRTY
        ops.forget_rows_(self.tensors, slab, handles[~in_use])

    @abstractmethod
    def erase(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> None:
        """Drops rows whose ids have been removed from their table.

        Args:
            slab: that is tiered.
            table: its number.
            ids: int64 [n].
            handles: int64 [n], that their rows had.
        """

    # -- steps ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of the present step: rows of its lookups stay in memory until it ends."""
        return self._clock[TierHead.EPOCH]

    def end_step(self, used_rows: Sequence[int]) -> None:
        """After a training step: rows of its lookups may lose their slots from now on.

        Args:
            used_rows: by slab, rows that have ever had an owner.

        Raises:
            RuntimeError: something could not be read or written.
        """
        self.check()
        clock = self._clock
        clock[TierHead.EPOCH] += 1
        clock[TierHead.TRAINING] = 0
        self._set_limits(used_rows)
        for slab in self.cached:
            limit, most = clock[self._at(slab, Tier.LIMIT)], self._at(slab, Tier.MOST_USED)
            used = clock[self._at(slab, Tier.USED)]
            # a part of few rows is less than what a batch has at the beginning of a training
            growing = self._cache.unit == "fraction" and 2 * clock[most] > used_rows[slab]
            if clock[most] > limit + limit // _SLACK and not growing:
                self._warn(slab, clock[most], limit)
            clock[most] = used - clock[self._at(slab, Tier.FREE_COUNT)]
            if used > limit + limit // _SLACK:
                self._shrink(slab, limit)

    def _warn(self, slab: int, used: int, limit: int) -> None:
        if used < 2 * self._warned:
            return
        self._warned = used
        warnings.warn(
            f"a step needed {used} rows of {self._slot_bytes[slab]} bytes in memory at once, but "
            f"the cache is to have {limit}: it was larger for that step. Give storage a larger "
            "cache, or take smaller batches, or step() more often",
            RuntimeWarning,
            stacklevel=2,
        )

    def _shrink(self, slab: int, limit: int) -> None:
        used = self._clock[self._at(slab, Tier.USED)]
        try:
            self._save_changed(slab, limit)
        except DiskFullError:
            self.check()
            return  # rows stay where they are until there is room
        self.drain()
        ops.shrink_cache_(self.tensors, slab, limit)  # of rows that are all saved
        slabs = len(self._rows.weights)
        for tensor in (self._rows.weights[slab], *self._rows.state[slab::slabs]):
            ops.release_(tensor, limit, used)

    def _set_limits(self, used_rows: Sequence[int]) -> None:
        bytes_of = {s: self._slot_bytes[s] * max(used_rows[s], 1) for s in self.cached}
        rows = sum(max(used_rows[s], 1) for s in self.cached)
        total = sum(bytes_of.values())
        for slab in self.cached:
            of_slab = max(used_rows[slab], 1)
            share = bytes_of[slab] / total if self._cache.unit == "bytes" else of_slab / rows
            limit = self._cache.slots(used_rows[slab], self._slot_bytes[slab], share)
            most = self.tensors.slots[slab].shape[0]
            self._clock[self._at(slab, Tier.LIMIT)] = min(limit, max(most, LEAST_SLOTS))

    def flush(self) -> None:
        """Begins to write all rows that have changed to the store.

        Raises:
            RuntimeError: the disk is full: some may have been written, and the others are still to
                be. Or something could not be read or written.
        """
        for slab in self.cached:
            self._save_changed(slab, 0)

    def _save_changed(self, slab: int, begin: int) -> None:
        """Begins to write rows that have changed, of slots from ``begin`` on."""
        while True:
            moves = ops.take_dirty_(self.tensors, slab, begin, _SAVED_AT_ONCE)
            if moves.shape[0] == 0:
                return
            try:
                self._move(moves)
            except BaseException:
                self.tensors.slots[slab][moves[:, Move.SLOT], Slot.MARKS] |= _DIRTY
                raise
            begin = int(moves[-1, Move.SLOT]) + 1

    def empty(self) -> None:
        """Takes all rows out of the cache; what has changed since they were saved is lost.

        Handles of slots that lookups have given before become stale with the next row.

        Raises:
            RuntimeError: something could not be read or written.
        """
        self.drain()
        slabs = len(self._rows.weights)
        for slab in self.cached:
            used = self.used_slots(slab)
            ops.shrink_cache_(self.tensors, slab, 0)  # and what should be saved is not
            places = self.tensors.places[slab]
            ops.release_(places, 0, places.shape[0])
            for tensor in (self._rows.weights[slab], *self._rows.state[slab::slabs]):
                ops.release_(tensor, 0, used)

    def used_slots(self, slab: int) -> int:
        """Slots of a slab that have memory.

        Args:
            slab: its number.
        """
        return self._clock[self._at(slab, Tier.USED)]

    def stats(self) -> StorageStats:
        """What the cache and the store have done, all slabs together."""
        columns = {
            "slots": Tier.LIMIT,
            "hits": Tier.HITS,
            "misses": Tier.MISSES,
            "prefetched": Tier.PREFETCHED,
            "evicted": Tier.EVICTED,
            "write_backs": Tier.WRITTEN,
        }
        counts = {
            name: sum(self._clock[self._at(slab, column)] for slab in self.cached)
            for name, column in columns.items()
        }
        free = sum(self._clock[self._at(slab, Tier.FREE_COUNT)] for slab in self.cached)
        cached = sum(self.used_slots(slab) for slab in self.cached) - free
        return StorageStats(cached=cached, **counts, **self._store_stats())

    def _store_stats(self) -> dict[str, Any]:
        """Those of :class:`StorageStats` that the store counts."""
        return {}


__all__ = ["Records", "Tiers"]
