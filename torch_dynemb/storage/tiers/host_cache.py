"""The cache in host memory beneath that of a GPU, and the thread that uses it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import ForkedProcessError
from torch_dynemb.ops.columns import DIRTY_MARK, GENERATION_BITS, GENERATION_MASK, Meta, Move, Slot
from torch_dynemb.ops.tensors import RowTensors
from torch_dynemb.process.forked import watch
from torch_dynemb.storage.tiers.store_tiers import StoreTiers

_THREAD = "dynemb-host-cache"

P = ParamSpec("P")
R = TypeVar("R")


class LeavingRows(NamedTuple):
    """Rows of a slab that leave the GPU.

    Attributes:
        slab: its number.
        positions: int64 [n], of the rows among the moves of a call.
        records: uint8 [n, bytes], in host memory.
        copied: recorded behind the copy to ``records``; None: they are there.
    """

    slab: int
    positions: Tensor
    records: Tensor
    copied: torch.cuda.Event | None


class LoadedRows(NamedTuple):
    """Rows of a slab that come to the GPU, in host memory.

    Attributes:
        slab: its number.
        slots: int64 [n], of the GPU's cache.
        generations: int32 [n], with which the rows are live in these slots.
        records: uint8 [n, bytes].
    """

    slab: int
    slots: Tensor
    generations: Tensor
    records: Tensor


class HostCache:
    """A cache of rows in host memory above a store, used by one thread.

    The thread does its work in order. So a row that has left the GPU is there when it is wanted
    again, and prefetches need no locks.

    Args:
        below: the cache and its store.
        rows: of ``below``.
        meta: int64 [T, 16] in host memory, constants of the tables.
        pinned: copy loaded rows to pinned memory.
    """

    def __init__(self, below: StoreTiers, rows: RowTensors, meta: Tensor, *, pinned: bool) -> None:
        self.below = below
        self.forked = False
        self._rows = rows
        self._meta = meta
        self._pinned = pinned
        self._failure: str | None = None  # not the error: its traceback keeps the tables alive
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)
        watch(self)

    def slab_of(self, table: int) -> int:
        """Return the slab of a table.

        Args:
            table: its number.
        """
        return int(self._meta[table, Meta.SLAB])

    def start(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue a call for the thread.

        Raises:
            ForkedProcessError: this process is a fork and lacks the thread.
        """
        if self.forked:
            raise ForkedProcessError(
                f"device_cache: process {os.getpid()} is a fork of the one that made the tables, "
                "and lacks the thread of their store: start processes with the method spawn"
            )
        return self._thread.submit(torch.no_grad()(call), *args, **kwargs)

    def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a call in the thread, after all earlier ones, and return its result.

        Raises:
            Exception: of the call.
        """
        return self.start(call, *args, **kwargs).result()

    def end(self) -> None:
        """End the thread after all queued calls."""
        # the garbage collector may call this in the thread itself
        own = threading.current_thread().name.startswith(_THREAD)
        self._thread.shutdown(wait=not own)

    def check(self) -> None:
        """Raise RuntimeError if rows were lost, without waiting."""
        self.below.check()
        if self._failure is not None:
            raise RuntimeError(
                "rows between the cache of the GPU and the store are lost: go back to a "
                f"checkpoint or a snapshot: {self._failure}"
            )

    def exchange(
        self, moves: Tensor, saved: Sequence[LeavingRows]
    ) -> tuple[Future[list[LoadedRows]], Future[None]]:
        """Start to take rows that leave the GPU, and to load others.

        Args:
            moves: int64 [n, 7] (``columns.Move``) in host memory, distinct rows.
            saved: rows that leave.

        Returns:
            The loaded rows, and the end of all work on ``saved``.
        """
        places = torch.empty(len(moves), dtype=torch.int64, device="cpu")
        loaded = self.start(self._or_fail, self._load, moves, places)
        return loaded, self.start(self._or_fail, self._save, saved, places)

    def end_step(self, used_rows: list[int]) -> Future[None]:
        """Start to end a training step.

        Args:
            used_rows: of each slab, the rows that the cache knows.
        """
        return self.start(self._or_fail, self.below.end_step_of, used_rows)

    def _or_fail(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            self.check()
            return call(*args, **kwargs)
        except BaseException as error:
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            raise

    def _load(self, moves: Tensor, places: Tensor) -> list[LoadedRows]:
        """Give all rows slots here, and copy those to load."""
        order = torch.argsort(moves[:, Move.TABLE], stable=True)
        by_table = moves[order].t().contiguous()
        tables, counts = torch.unique_consecutive(by_table[Move.TABLE], return_counts=True)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        staged = ops.StagedIds(
            self._meta, by_table[Move.ID], by_table[Move.HANDLE], ends, tables.tolist()
        )
        places[order] = self.below.stage_records(staged, by_table[Move.LOADS] == 0)
        loads = (moves[:, Move.LOADS] != 0) & (places >= 0)
        return [
            self._copied(slab, moves, places, loads & (moves[:, Move.SLAB] == slab))
            for slab in moves[loads, Move.SLAB].unique().tolist()
        ]

    def _copied(self, slab: int, moves: Tensor, places: Tensor, chosen: Tensor) -> LoadedRows:
        at = places[chosen]
        records = ops.gather_records(self._rows, slab, at >> GENERATION_BITS)
        found = records.view(torch.int32)[:, 0] == (at & GENERATION_MASK)
        of = moves[chosen][found]
        records = records[found]
        return LoadedRows(
            slab,
            of[:, Move.SLOT].contiguous(),
            of[:, Move.GENERATION].to(torch.int32),
            records.pin_memory() if self._pinned else records,
        )

    def _save(self, saved: Sequence[LeavingRows], places: Tensor) -> None:
        for slab, positions, records, copied in saved:
            if copied is not None:
                copied.synchronize()
            at = places[positions]
            own = at >= 0
            numbers, records = at[own] >> GENERATION_BITS, records[own]
            records.view(torch.int32)[:, 0] = (at[own] & GENERATION_MASK).to(torch.int32)
            ops.scatter_records_(self._rows, slab, numbers, records)
            self.below.tensors.slots[slab][numbers, Slot.MARKS] |= DIRTY_MARK


__all__ = ["HostCache", "LeavingRows", "LoadedRows"]
