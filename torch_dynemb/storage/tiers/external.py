"""Tiers over a store that is written in Python."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import InUseError
from torch_dynemb.ops.columns import GENERATION_BITS, Meta, Move
from torch_dynemb.ops.tensors import IndexTensors, RowTensors, TierTensors
from torch_dynemb.storage.tiers.cache_size import CacheSize
from torch_dynemb.storage.tiers.protocol import RecordStore
from torch_dynemb.storage.tiers.sharing import StoreOfModule
from torch_dynemb.storage.tiers.store_tiers import StoreTiers
from torch_dynemb.storage.tiers.tiers import Records

# Header of a record: offsets in 4-byte words, then in 8-byte words.
_GENERATION, _TABLE = 0, 1
_HANDLE, _ID = 1, 2
_SLOT_BITS = 36


# (store, table name) -> the group of this process with rows there
_in_use: WeakValueDictionary[tuple[int, str], ExternalTiers] = WeakValueDictionary()


def _stored_names(store: RecordStore, names: Sequence[str]) -> list[tuple[int, str]]:
    if isinstance(store, StoreOfModule):
        return _stored_names(store.store, [store.name(name) for name in names])
    return [(id(store), name) for name in names]


class ExternalTiers(StoreTiers):
    """A cache over a :class:`RecordStore`, which the looking-up thread calls.

    Args:
        store: reads and writes records.
        names: of the tables.
        index: of the tables; finds the current row of an id.
        cache, tensors, rows, cached, slot_bytes: as for :class:`StoreTiers`.

    Raises:
        RuntimeError: another table of that name has its rows in the store.
    """

    def __init__(
        self,
        store: RecordStore,
        names: Sequence[str],
        index: IndexTensors,
        cache: CacheSize,
        tensors: TierTensors,
        rows: RowTensors,
        cached: Sequence[int],
        slot_bytes: Sequence[int],
    ) -> None:
        super().__init__(cache, tensors, rows, cached, slot_bytes)
        self.store = store
        self._names = names
        self._index = index
        self._one_bag = index.tables.new_empty(0)
        stored = _stored_names(store, names)
        for _, name in (of_table for of_table in stored if of_table in _in_use):
            raise InUseError(
                f"ExternalStore: another table {name!r} of this process has its rows in this "
                "store: give one of them another name, or a store of its own",
                tables=[name],
            )
        _in_use.update(dict.fromkeys(stored, self))
        self._failure: str | None = None
        self._in_use = threading.Lock()

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        """Raise RuntimeError if another thread is in here, with moves that may be incomplete."""
        if not self._in_use.acquire(blocking=False):
            raise InUseError(
                "ExternalStore: another thread is looking these tables up, or prefetches: lookups "
                "of tables with a store change its cache, so call them one at a time",
                tables=self._names,
            )
        try:
            yield
        finally:
            self._in_use.release()

    def reserve_space(self, index: IndexTensors, batch: ops.LookupBatch) -> None:
        """Raise only if the store has failed before: its free space is unknown."""
        self.check()

    def stage(self, staged: ops.StagedIds, *, trains: bool) -> Tensor:
        self._check_eager()
        with self._one_thread():
            return self._stage(staged, trains=trains)

    def _stage(self, staged: ops.StagedIds, *, trains: bool) -> Tensor:
        self.check()
        planned = ops.plan_moves_(self.tensors, staged, trains=trains)
        self._move(planned.moves)
        return planned.handles

    def lookup(self, batch: ops.LookupBatch, handles: Tensor) -> Tensor:
        self._check_eager()
        rows = self._rows
        staged = ops.StagedIds.of(rows.meta, batch, handles)
        with self._one_thread():
            slots = self._stage(staged, trains=False)
            return ops.embedding_inference(rows, batch, slots)

    def prefetch(self, staged: ops.StagedIds, *, ahead: int) -> None:
        self._check_eager()
        with self._one_thread():
            self.check()
            planned = ops.plan_moves_(self.tensors, staged, trains=False, ahead=ahead)
            self._move(planned.moves)

    def stage_records(self, staged: ops.StagedIds, overwritten: Tensor) -> Tensor:
        with self._one_thread():
            self.check()
            planned = ops.plan_moves_(self.tensors, staged, trains=False)
            counts = staged.offsets[1:] - staged.offsets[:-1]
            tables = torch.tensor(staged.feature_tables, device="cpu").repeat_interleave(counts)
            slabs = staged.meta[tables, Meta.SLAB] << _SLOT_BITS
            slots = (slabs | planned.handles >> GENERATION_BITS)[overwritten]
            moves = planned.moves
            to = moves[:, Move.SLAB] << _SLOT_BITS | moves[:, Move.SLOT]
            self._move(moves[(moves[:, Move.LOADS] == 0) | ~torch.isin(to, slots)])
            return planned.handles

    def reserve_saves(self, rows: Sequence[int]) -> None:
        """Raise only if the store has failed before: its free space is unknown."""
        self.check()

    def _check_eager(self) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "tables with an ExternalStore cannot be compiled, because the store is called in "
                "Python: leave the lookup out of torch.compile, or use SSDStore"
            )

    def _move(self, moves: Tensor) -> None:
        try:
            loads = moves[:, Move.LOADS] != 0
            for slab, table, some in _by_table(moves[~loads]):
                self._save(slab, table, some)
            for slab, table, some in _by_table(moves[loads]):
                self._load(slab, table, some)
        except BaseException as error:
            # places and slots are wrong from now on
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _save(self, slab: int, table: int, moves: Tensor) -> None:
        records = ops.gather_records(self._rows, slab, moves[:, Move.SLOT].contiguous())
        live = records.view(torch.int32)[:, _GENERATION] == moves[:, Move.GENERATION]
        # The store has one record per id: an earlier row must not overwrite the current one.
        ids = moves[:, Move.ID].contiguous().to(self._one_bag.device)
        present = ops.find(self._index, ids, self._one_bag, [table]).handles
        live &= present.cpu() == moves[:, Move.HANDLE]
        self._write(table, moves[live, Move.ID], moves[live, Move.HANDLE], records[live])

    def _write(self, table: int, ids: Tensor, handles: Tensor, records: Tensor) -> None:
        if ids.shape[0] == 0:
            return
        header = records.view(torch.int32)
        header[:, _GENERATION], header[:, _TABLE] = 0, table
        words = records.view(torch.int64)
        words[:, _HANDLE], words[:, _ID] = handles, ids
        self.store.write(self._names[table], ids, records)

    def _load(self, slab: int, table: int, moves: Tensor) -> None:
        stored = self._read_store(slab, table, moves[:, Move.ID], moves[:, Move.HANDLE])
        found = stored.found
        if not bool(found.any()):
            return
        records, slots = stored.records[found], moves[found, Move.SLOT]
        records.view(torch.int32)[:, _GENERATION] = moves[found, Move.GENERATION].to(torch.int32)
        ops.scatter_records_(self._rows, slab, slots, records)

    def _read_store(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        self.check()
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        size = ops.gather_records(self._rows, slab, none).shape[1]
        records = torch.zeros(ids.shape[0], size, dtype=torch.uint8, device="cpu")
        if ids.shape[0] == 0:
            return Records(records, torch.zeros(0, dtype=torch.bool, device="cpu"))
        name = self._names[table]
        found = self.store.read(name, ids.contiguous(), records)
        if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != ids.shape:
            raise TypeError(
                f"ExternalStore: read({name!r}, ...) returned {found!r}, expected a bool tensor of "
                f"shape {tuple(ids.shape)}"
            )
        words = records.view(torch.int64)
        return Records(records, found & (words[:, _HANDLE] == handles) & (words[:, _ID] == ids))

    def _write_store(
        self, slab: int, table: int, ids: Tensor, handles: Tensor, records: Tensor
    ) -> None:
        self.check()
        self._write(table, ids, handles, records.clone())

    def drain(self) -> None:
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                "the ExternalStore has failed before, and rows of the tables are lost: go back to "
                f"a checkpoint: {self._failure}"
            )

    def erase(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> None:
        self.drop(slab, handles)
        self.store.erase(self._names[table], ids)


def _by_table(moves: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield slab, table and moves, for each table of each slab."""
    keys = moves[:, [Move.SLAB, Move.TABLE]]
    for slab, table in torch.unique(keys, dim=0).tolist():
        chosen = (keys[:, 0] == slab) & (keys[:, 1] == table)
        yield slab, table, moves[chosen]


__all__ = ["ExternalTiers"]
