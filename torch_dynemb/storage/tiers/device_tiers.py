"""Tiers of a GPU above a store: caches in its own memory (HBM) and in host memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb._library.finalizers import finalize
from torch_dynemb.errors import DeviceMemoryError, DiskFullError
from torch_dynemb.ops.columns import (
    DIRTY_MARK,
    GENERATION_BITS,
    GENERATION_MASK,
    MOVE_COLUMNS,
    Move,
    Slot,
    Tier,
    TierHead,
)
from torch_dynemb.ops.tensors import IndexTensors, RowTensors, TierTensors
from torch_dynemb.storage.tiers.cache_size import CacheSize
from torch_dynemb.storage.tiers.device_slots import DeviceSlots
from torch_dynemb.storage.tiers.host_cache import HostCache, LeavingRows, LoadedRows
from torch_dynemb.storage.tiers.row_records import packed_rows, unpack_rows
from torch_dynemb.storage.tiers.stats import StorageStats, cache_counts
from torch_dynemb.storage.tiers.tiers import Records, Tiers

_EPOCH_SHIFT = 32  # of the last use, in ``Slot.USE``
_TABLE_SHIFT = GENERATION_BITS + 20
_SAVED_AT_ONCE = 1 << 14
# A cache gives memory back when it exceeds its limit by 1 / _SLACK.
_SLACK = 16


class DeviceTiers(Tiers):
    """A cache in HBM, above a cache in host memory and its store.

    A row is in HBM, in host memory, in both, or in neither. A row that has changed in HBM is valid
    only there, until it leaves HBM or is saved.

    Args:
        size: of the cache in HBM.
        host: the cache in host memory.
        background: whether the thread may use the store and the index while the caller goes on.
        tensors: of the cache in HBM, empty.
        index, rows: of the group; rows have the slots of the cache.
        cached: numbers of the tiered slabs.
        limits: by slab, the slots that the cache should have, if ``size`` is not a fraction.

    Raises:
        RuntimeError: HBM is short.
    """

    def __init__(
        self,
        size: CacheSize,
        host: HostCache,
        tensors: TierTensors,
        index: IndexTensors,
        rows: RowTensors,
        cached: Sequence[int],
        limits: Sequence[int],
        *,
        background: bool,
    ) -> None:
        super().__init__(tensors, cached)
        self.host = host
        # Work of the thread is done before the store is closed.
        self._end = finalize(self, host.end)
        self._rows = rows
        self._slots = DeviceSlots(tensors, rows)
        self._background = background
        self._steps = 0
        self._warned = 0
        slabs = len(rows.weights)
        self._used_rows = [0] * slabs  # that the host cache knows of
        self._used = [0] * slabs  # slots
        self._limits = [0] * slabs  # slots, as far as known here
        self._loading: list[Future[list[LoadedRows]]] = []
        fraction = size.value if size.unit == "fraction" else 0.0
        ops.bind_tiers(
            index,
            tensors,
            rows,
            fraction=fraction,
            limits=() if fraction else limits,
            host_bytes=None,
        )

    # -- lookups -------------------------------------------------------------------------------

    def reserve_space(self, index: IndexTensors, batch: ops.LookupBatch) -> None:
        self._check_eager()
        self.check()
        ids, offsets, tables = batch.index_arguments
        self._reserve(ids, offsets, tables, lambda: ops.find(index, ids, offsets, tables).handles)

    def stage(self, staged: ops.StagedIds, *, trains: bool) -> Tensor:
        handles = self._begin(staged, trains=trains)
        self._settle()
        return handles

    def lookup(self, batch: ops.LookupBatch, handles: Tensor) -> Tensor:
        staged = ops.StagedIds.of(self._rows.meta, batch, handles)
        slots = self._begin(staged, trains=False)
        self._settle()
        return ops.embedding_inference(self._rows, batch, slots)

    def prefetch(self, staged: ops.StagedIds, *, ahead: int) -> None:
        self._begin(staged, trains=False, ahead=ahead)
        if not self._background:
            self._settle()

    def _begin(self, staged: ops.StagedIds, *, trains: bool, ahead: int = 0) -> Tensor:
        """Give rows slots, and start to move them."""
        self._check_eager()
        self.check()
        ids, offsets, tables = staged.ids, staged.offsets, staged.feature_tables
        self._reserve(ids, offsets, tables, lambda: staged.handles)
        self._settle()
        taken = ops.take_slots_(self.tensors, staged, trains=trains, ahead=ahead)
        self._move(taken.moves)
        self._note_growth(taken.moves)
        for needed in taken.missing.tolist():
            if needed > 0:
                self._settle()
                raise DeviceMemoryError(
                    f"device_cache: a step needs {needed} rows in GPU memory at once, which is "
                    "more than there is: take smaller batches, or step() more often"
                )
        return taken.handles

    def _check_eager(self) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "tables with device_cache= cannot be compiled, because Python moves their rows: "
                "leave the lookup out of torch.compile, or use HostStore(cache=...)"
            )

    def _reserve(
        self,
        ids: Tensor,
        offsets: Tensor,
        tables: Sequence[int],
        find: Callable[[], Tensor],
    ) -> None:
        """Reserve space in the store for all rows that a call may push out of host memory.

        Raises:
            DiskFullError: the store lacks space; nothing has changed.
        """
        # each id may bring a row to host memory, and push one there out of HBM
        most = [2 * ids.numel() * int(self.holds(slab)) for slab in range(len(self._used))]
        try:
            self.host.run(self.host.below.reserve_saves, most)
        except DiskFullError:
            missing = self._missing_rows(ids, offsets, tables, find())
            self.host.run(self.host.below.reserve_saves, [2 * rows for rows in missing])

    def _missing_rows(
        self, ids: Tensor, offsets: Tensor, tables: Sequence[int], handles: Tensor
    ) -> list[int]:
        """Return an upper bound of the rows without a slot, by slab."""
        rows = [0] * len(self._used)
        bags = (len(offsets) - 1) // len(tables) if len(offsets) > 0 else 0
        ends = offsets[::bags].tolist() if bags > 0 else [0, len(ids)]
        for table, begin, end in zip(tables, ends[:-1], ends[1:], strict=True):
            slab = self.host.slab_of(table)
            if not self.holds(slab):
                continue
            of = handles[begin:end]
            places = self.tensors.places[slab][of.clamp(min=0) >> GENERATION_BITS]
            rows[slab] += ids[begin:end][(of < 0) | (places <= 0)].unique().numel()
        return rows

    # -- moves ---------------------------------------------------------------------------------

    def _move(self, moves: Tensor) -> Future[None] | None:
        """Start to move rows between HBM and host memory; :meth:`_settle` ends the loads."""
        if len(moves) == 0:
            return None
        saves = moves[:, Move.LOADS] == 0
        saved = [
            self._copied(slab, moves, (saves & (moves[:, Move.SLAB] == slab)).nonzero()[:, 0])
            for slab in moves[saves, Move.SLAB].unique().tolist()
        ]
        for slab in moves[:, Move.SLAB].unique().tolist():
            rows = moves[moves[:, Move.SLAB] == slab, Move.HANDLE] >> GENERATION_BITS
            self._used_rows[slab] = max(self._used_rows[slab], int(rows.max()) + 1)
        loaded, ended = self.host.exchange(moves, saved)
        self._loading.append(loaded)
        return ended

    def _copied(self, slab: int, moves: Tensor, positions: Tensor) -> LeavingRows:
        numbers = moves[positions, Move.SLOT].to(self._slots.device, non_blocking=True)
        records = packed_rows(self._slots.rows(slab), numbers)
        if records.device.type == "cpu":
            return LeavingRows(slab, positions, records, None)
        copies = torch.empty(records.shape, dtype=records.dtype, device="cpu", pin_memory=True)
        copies.copy_(records, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return LeavingRows(slab, positions, copies, copied)

    @torch.no_grad()
    def _settle(self) -> None:
        """Copy the rows of all loads into their slots."""
        while self._loading:
            for slab, slots, generations, records in _result(self._loading.pop(0)):
                numbers = slots.to(self._slots.device, non_blocking=True)
                copies = records.to(self._slots.device, non_blocking=True)
                unpack_rows(self._slots.rows(slab), numbers, copies)
                live = generations.to(self._slots.device, non_blocking=True)
                self._rows.generations[slab].data.index_copy_(0, numbers, live)

    # -- rows without a lookup -----------------------------------------------------------------

    def read(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        self._settle()
        at, own = self._slots.find(slab, handles)
        marks = self.tensors.slots[slab][at, Slot.MARKS]
        found = own & (self._rows.generations[slab][at] == (marks & GENERATION_MASK))
        records = packed_rows(self._slots.rows(slab), at)
        rest = ~own
        if bool(rest.any()):
            stored = self.host.run(
                self.host.below.read, slab, table, ids[rest].cpu(), handles[rest].cpu()
            )
            records[rest] = stored.records.to(self._slots.device)
            found[rest] = stored.found.to(self._slots.device)
        return Records(records, found)

    def write(self, slab: int, table: int, ids: Tensor, handles: Tensor, records: Tensor) -> None:
        self._settle()
        at, own = self._slots.find(slab, handles)
        rest = ~own
        if bool(rest.any()):
            copies = records[rest].cpu()
            self.host.run(
                self.host.below.write, slab, table, ids[rest].cpu(), handles[rest].cpu(), copies
            )
            self._slots.make_stale(slab, handles[rest])
            self._slots.forget(slab, handles[rest])
        if bool(own.any()):
            at = at[own]
            slots = self.tensors.slots[slab]
            unpack_rows(self._slots.rows(slab), at, records[own])
            live = (slots[at, Slot.MARKS] & GENERATION_MASK).to(torch.int32)
            self._rows.generations[slab].index_copy_(0, at, live)
            slots[at, Slot.MARKS] |= DIRTY_MARK

    def erase(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> None:
        self._settle()
        self.host.run(self.host.below.erase, slab, table, ids.cpu(), handles.cpu())
        self._slots.drop(slab, handles)

    def rows_of(self, slab: int, numbers: Tensor) -> Tensor:
        return (self.tensors.slots[slab][numbers, Slot.OWNER] - 1) >> GENERATION_BITS

    # -- steps ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._steps

    def end_step(self, index: IndexTensors) -> None:
        self.check()
        self._steps += 1
        ops.end_epoch_(self.tensors)
        for slab in self.cached:
            limit = self._limits[slab]
            if self._used[slab] > limit + limit // _SLACK:
                self._warn(slab, self._used[slab], limit)
                self._shrink(slab)
        ended = self.host.end_step(list(self._used_rows))
        if not self._background:
            ended.result()

    def check(self) -> None:
        self.host.check()

    def _note_growth(self, moves: Tensor) -> None:
        for slab in self.cached if len(moves) > 0 else ():
            slots = moves[moves[:, Move.SLAB] == slab, Move.SLOT]
            if slots.numel() > 0:
                self._used[slab] = max(self._used[slab], int(slots.max()) + 1)
            if self._used[slab] > self._limits[slab]:
                self._limits[slab] = int(self.tensors.clock[1 + slab, Tier.LIMIT])

    def _warn(self, slab: int, used: int, limit: int) -> None:
        if used < 2 * self._warned:
            return
        self._warned = used
        warnings.warn(
            f"a step needed {used} rows in GPU memory at once, but device_cache is for {limit}: it "
            "grew for that step. Give storage a larger device_cache, or take smaller batches, or "
            "step() more often",
            RuntimeWarning,
            stacklevel=2,
        )

    def _shrink(self, slab: int) -> None:
        """Give back the memory of slots beyond the limit."""
        limit = int(self.tensors.clock[1 + slab, Tier.LIMIT])
        try:
            self._save_changed(slab, limit)
        except DiskFullError:
            return  # rows stay in HBM until the disk has room
        slots, clock = self.tensors.slots[slab], self.tensors.clock[1 + slab]
        used = int(clock[Tier.USED])
        taken = limit + (slots[limit:used, Slot.OWNER] > 0).nonzero()[:, 0]
        self._slots.clear(slab, taken)
        clock[Tier.USED] = limit
        clock[Tier.CURSOR].clamp_(max=limit)
        free = (slots[:limit, Slot.OWNER] <= 0).nonzero()[:, 0].flip(0)
        self.tensors.free_slots[slab][: len(free)] = free.to(torch.int32)
        clock[Tier.FREE_COUNT] = len(free)
        ops.release_slots(self.tensors, slab, limit)
        self._used[slab] = self._limits[slab] = limit

    def flush(self) -> None:
        """Save all changed rows to host memory.

        Raises:
            RuntimeError: the disk is full: rows that were not saved stay marked as changed. Or a
                read or write has failed.
        """
        for slab in self.cached:
            self._save_changed(slab, 0)

    def _save_changed(self, slab: int, begin: int) -> None:
        """Save the changed rows of slots from ``begin`` on."""
        self._settle()
        slots, clock = self.tensors.slots[slab], self.tensors.clock
        used = int(clock[1 + slab, Tier.USED])
        words = slots[begin:used]
        generations = words[:, Slot.MARKS] & GENERATION_MASK
        written = self._rows.generations[slab][begin:used] == generations
        dirty = (words[:, Slot.OWNER] > 0) & (words[:, Slot.MARKS] & DIRTY_MARK != 0) & written
        in_a_step = bool(clock[0, TierHead.TRAINING] != 0)
        for at in (begin + dirty.nonzero()[:, 0]).split(_SAVED_AT_ONCE):
            rows = [0] * len(self._used)
            rows[slab] = len(at)
            self.host.run(self.host.below.reserve_saves, rows)
            ended = self._move(self._saves(slab, at))
            self._settle()
            if ended is not None:
                ended.result()
            # a backward of this step may still change the rows of its lookups
            last = slots[at, Slot.USE] >> _EPOCH_SHIFT
            past = (last - clock[0, TierHead.EPOCH]).to(torch.int32) < 0
            slots[at[past] if in_a_step else at, Slot.MARKS] &= ~DIRTY_MARK
            clock[1 + slab, Tier.WRITTEN] += len(at)

    def _saves(self, slab: int, at: Tensor) -> Tensor:
        words = self.tensors.slots[slab][at].cpu()
        moves = torch.zeros(len(at), MOVE_COLUMNS, dtype=torch.int64, device="cpu")
        moves[:, Move.SLAB] = slab
        moves[:, Move.SLOT] = at.cpu()
        moves[:, Move.HANDLE] = words[:, Slot.OWNER] - 1
        moves[:, Move.ID] = words[:, Slot.ID]
        moves[:, Move.TABLE] = words[:, Slot.MARKS] >> _TABLE_SHIFT
        moves[:, Move.GENERATION] = words[:, Slot.MARKS] & GENERATION_MASK
        return moves

    def empty(self) -> None:
        """Clear the cache in HBM; changes since the last save are lost."""
        self._settle()
        for slab in self.cached:
            slots, clock = self.tensors.slots[slab], self.tensors.clock[1 + slab]
            used = int(clock[Tier.USED])
            self._slots.clear(slab, (slots[:used, Slot.OWNER] > 0).nonzero()[:, 0])
            for column in (Tier.USED, Tier.CURSOR, Tier.FREE_COUNT, Tier.PORTION):
                clock[column] = 0
            self._used[slab] = 0

    # -- memory --------------------------------------------------------------------------------

    def used_slots(self, slab: int) -> int:
        return int(self.tensors.clock[1 + slab, Tier.USED])

    def rows_in_memory(self, slab: int, used_rows: int) -> int:
        return self.used_slots(slab)

    def kept_rows(self, slab: int, used_rows: int) -> int:
        owners = self.tensors.slots[slab][: self.used_slots(slab), Slot.OWNER]
        rows = (owners - 1) >> GENERATION_BITS
        self._slots.clear(slab, ((owners > 0) & (rows >= used_rows)).nonzero()[:, 0])
        return used_rows

    def stats(self) -> StorageStats:
        host = self.host.run(self.host.below.stats)
        _, *clocks = self.tensors.clock.tolist()
        return StorageStats(
            **cache_counts(lambda column: sum(clocks[slab][column] for slab in self.cached)),
            host_slots=host.slots,
            host_cached=host.cached,
            host_hits=host.hits,
            host_misses=host.misses,
            host_evicted=host.evicted,
            host_write_backs=host.write_backs,
            reads=host.reads,
            bytes_read=host.bytes_read,
            bytes_written=host.bytes_written,
            collected=host.collected,
            stored=host.stored,
            disk_bytes=host.disk_bytes,
            queued=host.queued,
            most_queued=host.most_queued,
            waited=host.waited,
        )


def _result(future: Future[list[LoadedRows]]) -> list[LoadedRows]:
    try:
        return future.result()
    finally:
        del future  # the traceback of its error would keep it, and the tables, alive


__all__ = ["DeviceTiers"]
