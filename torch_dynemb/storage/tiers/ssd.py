"""Tiers over files of a directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb._library.finalizers import finalize
from torch_dynemb.ops.columns import StoreStat
from torch_dynemb.ops.tensors import IndexTensors, RowTensors, TierTensors
from torch_dynemb.storage.tiers.configs import IO_PATHS, SSDStore
from torch_dynemb.storage.tiers.pinned_rows import PinnedRows
from torch_dynemb.storage.tiers.store_files import StoreFiles
from torch_dynemb.storage.tiers.store_tiers import StoreTiers
from torch_dynemb.storage.tiers.tiers import Records

# Subdirectory of a store with its snapshots.
KEPT_FOLDER = "index"


def _keeps_snapshots(path: Path) -> bool:
    """Return whether a store has rows that snapshots need.

    Raises:
        RuntimeError: the directory cannot be read; nothing has been deleted.
    """
    folder = path / KEPT_FOLDER
    try:
        return bool(os.listdir(folder))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RuntimeError(
            f"SSDStore: {folder} cannot be listed ({error.strerror}), so snapshots may need the "
            "rows there: nothing has been deleted; make it readable"
        ) from error


class SSDTiers(StoreTiers, StoreFiles):
    """A cache over files, which a thread of the library reads and writes.

    Args:
        storage: config of the files.
        slab_names: names of the directories of slabs.
        tensors, rows, cached, slot_bytes: as for :class:`StoreTiers`.

    Raises:
        InUseError: another process or group uses the directory.
        DamagedStoreError, UnsupportedFormatError: files are damaged, or of another version.
        RuntimeError: files belong to other tables.
    """

    pins = True

    def __init__(
        self,
        storage: SSDStore,
        slab_names: Sequence[str],
        tensors: TierTensors,
        rows: RowTensors,
        cached: Sequence[int],
        slot_bytes: Sequence[int],
    ) -> None:
        super().__init__(storage.cache_size, tensors, rows, cached, slot_bytes)
        self.storage = storage
        ops.store_open(
            tensors,
            rows,
            path=str(storage.path),
            slab_names=slab_names,
            tiered=[int(slab in cached) for slab in range(len(slab_names))],
            segment_bytes=storage.segment_bytes,
            disk_bytes=storage.disk_bytes,
            io=IO_PATHS.index(storage.io),
        )
        # The thread only knows addresses: it must end before this object frees the tensors.
        self._end = finalize(self, ops.store_close, tensors.clock)
        if not _keeps_snapshots(Path(storage.path)):
            # without a snapshot, rows of an earlier run cannot be read any more: delete them
            self.keep([torch.empty(0, dtype=torch.int64, device="cpu") for _ in slab_names])

    def reserve_space(self, index: IndexTensors, batch: ops.LookupBatch) -> None:
        ops.reserve_space_(self.tensors, index, batch)

    def stage(self, staged: ops.StagedIds, *, trains: bool) -> Tensor:
        return ops.stage_(self.tensors, staged, trains=trains)

    def lookup(self, batch: ops.LookupBatch, handles: Tensor) -> Tensor:
        return ops.staged_lookup_(self.tensors, self._rows, batch, handles)

    def prefetch(self, staged: ops.StagedIds, *, ahead: int) -> None:
        ops.prefetch_(self.tensors, staged, ahead=ahead)

    def stage_records(self, staged: ops.StagedIds, overwritten: Tensor) -> Tensor:
        return ops.stage_records_(self.tensors, staged, overwritten)

    def reserve_saves(self, rows: Sequence[int]) -> None:
        ops.reserve_saves_(self.tensors.clock, rows)

    def _move(self, moves: Tensor) -> None:
        ops.store_submit(self.tensors.clock, moves)

    def _read_store(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        return Records(*ops.store_read(self.tensors.clock, slab, handles, ids))

    def _write_store(
        self, slab: int, table: int, ids: Tensor, handles: Tensor, records: Tensor
    ) -> None:
        ops.store_write(self.tensors.clock, slab, handles, ids, table, records)

    def drain(self) -> None:
        ops.store_drain(self.tensors.clock)

    def check(self) -> None:
        ops.store_check(self.tensors.clock)

    def _store_stats(self) -> dict[str, Any]:
        counts = ops.store_stats(self.tensors.clock).tolist()
        columns = {
            "reads": StoreStat.READS,
            "bytes_read": StoreStat.BYTES_READ,
            "bytes_written": StoreStat.BYTES_WRITTEN,
            "collected": StoreStat.COLLECTED,
            "stored": StoreStat.LIVE_RECORDS,
            "disk_bytes": StoreStat.DISK_BYTES,
            "queued": StoreStat.QUEUED,
            "most_queued": StoreStat.MOST_QUEUED,
        }
        stats = {name: counts[column] for name, column in columns.items()}
        return {**stats, "waited": counts[StoreStat.WAITED_US] / 1e6}

    def sync(self) -> ops.StoreSnapshot:
        self.flush()
        self.drain()
        return ops.store_sync(self.tensors.clock)

    def pin(self) -> PinnedRows:
        self.flush()
        self.drain()
        return PinnedRows(self)

    def keep(self, files: Sequence[Tensor]) -> None:
        ops.store_keep(self.tensors.clock, files)

    def restore(self, snapshot: ops.StoreSnapshot) -> None:
        self.drain()
        ops.store_load(self.tensors.clock, snapshot)
        self.empty()

    def erase(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> None:
        self.drain()
        self.drop(slab, handles)
        ops.store_erase(self.tensors.clock, slab, handles)


__all__ = ["KEPT_FOLDER", "SSDTiers"]
