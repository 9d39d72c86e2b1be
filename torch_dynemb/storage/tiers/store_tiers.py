"""The base of tiers in the memory of the CPU: a cache of rows, and the store beneath it."""

from __future__ import annotations

import ctypes
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import DiskFullError
from torch_dynemb.ops.columns import (
    DIRTY_MARK,
    GENERATION_BITS,
    GENERATION_MASK,
    TIER_COLUMNS,
    Move,
    Slab,
    Slot,
    Tier,
    TierHead,
)
from torch_dynemb.ops.tensors import IndexTensors, RowTensors, TierTensors
from torch_dynemb.storage.tiers.cache_size import LEAST_SLOTS, CacheSize
from torch_dynemb.storage.tiers.stats import StorageStats, cache_counts
from torch_dynemb.storage.tiers.tiers import Records, Tiers

_EPOCH_SHIFT = 32  # of the last use, in ``Slot.USE``
_SAVED_AT_ONCE = 1 << 14
# A cache gives memory back when it exceeds its limit by 1 / _SLACK.
_SLACK = 16


class StoreTiers(Tiers):
    """The tiered slabs of a group: a cache of rows in memory, and a store.

    Args:
        cache: intended number of rows in memory.
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
        super().__init__(tensors, cached)
        self._cache = cache
        self._rows = rows
        self._slot_bytes = slot_bytes
        # Reading an element of a tensor takes microseconds, and every step reads several.
        words = ctypes.c_int64 * tensors.clock.numel()
        self._clock = words.from_address(tensors.clock.data_ptr())
        self._clock[TierHead.EPOCH] = 1
        self._warned = 0
        for slab in self.cached:
            self._clock[self._at(slab, Tier.SLOT_BYTES)] = slot_bytes[slab]
        self._set_limits([0] * len(slot_bytes))

    def _at(self, slab: int, column: Tier) -> int:
        return (1 + slab) * TIER_COLUMNS + column

    # -- beneath the cache of a GPU ------------------------------------------------------------

    @abstractmethod
    def stage_records(self, staged: ops.StagedIds, overwritten: Tensor) -> Tensor:
        """Give rows slots until the next call; see :func:`torch_dynemb.ops.stage_records_`.

        Args:
            staged, overwritten: as there.
        """

    @abstractmethod
    def reserve_saves(self, rows: Sequence[int]) -> None:
        """Reserve space in the store for changed rows that others push out of the cache.

        Args:
            rows: for each slab, the most rows that will come into the cache.

        Raises:
            RuntimeError: the store lacks space, or has failed; nothing has changed.
        """

    # -- rows without a lookup -----------------------------------------------------------------

    def read(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        self.drain()
        slots, generations = self.tensors.slots[slab], self._rows.generations[slab]
        places = self.tensors.places[slab][handles >> GENERATION_BITS].long() - 1
        at = places.clamp(min=0)
        there = (places >= 0) & (slots[at, Slot.OWNER] == handles + 1)
        live = generations[at] == (slots[at, Slot.MARKS] & GENERATION_MASK)
        found = there & live
        if bool(there.all()):
            return Records(ops.gather_records(self._rows, slab, at), found)
        stored = self._read_store(slab, table, ids, handles)
        if bool(there.any()):
            stored.records[there] = ops.gather_records(self._rows, slab, at[there])
        return Records(stored.records, torch.where(there, live, stored.found))

    def write(self, slab: int, table: int, ids: Tensor, handles: Tensor, records: Tensor) -> None:
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
            records.view(torch.int32)[:, 0] = (marks & GENERATION_MASK).to(torch.int32)
            ops.scatter_records_(self._rows, slab, at, records)
            slots[at, Slot.MARKS] = marks | DIRTY_MARK

    def _make_stale(self, slab: int, at: Tensor) -> None:
        """Make gradients of slots stale, as after a change of the row's owner."""
        slots = self.tensors.slots[slab]
        marks = slots[at, Slot.MARKS]
        following = ((marks & GENERATION_MASK) % GENERATION_MASK) + 1  # 0 means: no row
        slots[at, Slot.MARKS] = (marks & ~GENERATION_MASK) | following
        self._rows.generations[slab][at] = following.to(torch.int32)

    @abstractmethod
    def _read_store(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records: ...

    @abstractmethod
    def _write_store(
        self, slab: int, table: int, ids: Tensor, handles: Tensor, records: Tensor
    ) -> None: ...

    @abstractmethod
    def _move(self, moves: Tensor) -> None:
        """Start to move rows between slots and the store; see ``columns.Move``."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until all moves are done.

        Raises:
            RuntimeError: a read or write has failed.
        """

    def drop(self, slab: int, handles: Tensor) -> None:
        """Drop rows without an owner from the cache without writing them to the store.

        Rows in lookups of this step keep their slots until it ends, since gradients may follow.

        Args:
            slab: a tiered one.
            handles: int64 [n], of the rows while they had an owner.
        """
        slots = self.tensors.slots[slab]
        at = self.tensors.places[slab][handles >> GENERATION_BITS].long() - 1
        last = slots[at.clamp(min=0), Slot.USE] >> _EPOCH_SHIFT
        in_use = (at >= 0) & ((last - self.epoch).to(torch.int32) >= 0)
        slots[at[in_use], Slot.MARKS] &= ~DIRTY_MARK
        ops.forget_rows_(self.tensors, slab, handles[~in_use])

    # -- steps ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._clock[TierHead.EPOCH]

    def end_step(self, index: IndexTensors) -> None:
        self.end_step_of(index.slabs[:, Slab.NEXT_ROW].tolist())

    def end_step_of(self, used_rows: Sequence[int]) -> None:
        """End a training step, see :meth:`end_step`.

        Args:
            used_rows: of each slab, the rows that have had an owner.
        """
        self.check()
        clock = self._clock
        clock[TierHead.EPOCH] += 1
        clock[TierHead.TRAINING] = 0
        self._set_limits(used_rows)
        for slab in self.cached:
            limit, most = clock[self._at(slab, Tier.LIMIT)], self._at(slab, Tier.MOST_USED)
            used = clock[self._at(slab, Tier.USED)]
            # early in training, a batch has more rows than a fraction of the few rows so far
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
            f"the cache is for {limit}: it grew for that step. Give storage a larger cache, or "
            "take smaller batches, or step() more often",
            RuntimeWarning,
            stacklevel=2,
        )

    def _shrink(self, slab: int, limit: int) -> None:
        used = self._clock[self._at(slab, Tier.USED)]
        try:
            self._save_changed(slab, limit)
        except DiskFullError:
            self.check()
            return  # rows stay in memory until the disk has room
        self.drain()
        with ops.locked([self.tensors.clock]):  # no lookup of another thread takes the slots
            ops.shrink_cache_(self.tensors, slab, limit)  # drops saved rows only
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
        """Start to write all changed rows to the store.

        Raises:
            RuntimeError: the disk is full: rows that were not written stay marked as changed. Or a
                read or write has failed.
        """
        for slab in self.cached:
            self._save_changed(slab, 0)

    def _save_changed(self, slab: int, begin: int) -> None:
        """Start to write the changed rows of slots from ``begin`` on."""
        while True:
            moves = ops.take_dirty_(self.tensors, slab, begin, _SAVED_AT_ONCE)
            if moves.shape[0] == 0:
                return
            try:
                self._move(moves)
            except BaseException:
                self.tensors.slots[slab][moves[:, Move.SLOT], Slot.MARKS] |= DIRTY_MARK
                raise
            begin = int(moves[-1, Move.SLOT]) + 1

    def empty(self) -> None:
        """Clear the cache; changes since the last save are lost.

        Handles that earlier lookups returned become stale with the next row of their slot.

        Raises:
            RuntimeError: a read or write has failed.
        """
        self.drain()
        slabs = len(self._rows.weights)
        with ops.locked([self.tensors.clock]):
            for slab in self.cached:
                used = self.used_slots(slab)
                ops.shrink_cache_(self.tensors, slab, 0)  # without saving changed rows
                places = self.tensors.places[slab]
                ops.release_(places, 0, places.shape[0])
                for tensor in (self._rows.weights[slab], *self._rows.state[slab::slabs]):
                    ops.release_(tensor, 0, used)

    def used_slots(self, slab: int) -> int:
        return self._clock[self._at(slab, Tier.USED)]

    def rows_in_memory(self, slab: int, used_rows: int) -> int:
        return self.used_slots(slab)

    def kept_rows(self, slab: int, used_rows: int) -> int:
        return self.used_slots(slab)

    def rows_of(self, slab: int, numbers: Tensor) -> Tensor:
        return (self.tensors.slots[slab][numbers, Slot.OWNER] - 1) >> GENERATION_BITS

    def stats(self) -> StorageStats:
        counts = cache_counts(
            lambda column: sum(self._clock[self._at(slab, column)] for slab in self.cached)
        )
        return StorageStats(**counts, **self._store_stats())

    def _store_stats(self) -> dict[str, Any]:
        """Return the fields of :class:`StorageStats` that the store counts."""
        return {}


__all__ = ["StoreTiers"]
