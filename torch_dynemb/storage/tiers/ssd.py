"""Rows in files of a directory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import StoreStat
from torch_dynemb.ops.tensors import IndexTensors, RowTensors, TierTensors
from torch_dynemb.storage.tiers.configs import IO_PATHS, SSDStore
from torch_dynemb.storage.tiers.held_rows import HeldRows
from torch_dynemb.storage.tiers.tiers import Records, Tiers

# In the directory of a store: what it keeps for snapshots.
KEPT_FOLDER = "index"


def _keeps_snapshots(path: Path) -> bool:
    """Whether a store has rows that snapshots need.

    Raises:
        RuntimeError: it cannot be read: nothing is deleted then.
    """
    folder = path / KEPT_FOLDER
    try:
        return bool(os.listdir(folder))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RuntimeError(
            f"SSDStore: {folder} cannot be listed ({error.strerror}), so whether snapshots need "
            "the rows there is not known: nothing has been deleted; make it readable"
        ) from error


class SSDTiers(Tiers):
    """A cache over files, which a thread of the library reads and writes.

    Args:
        storage: where the files are.
        slab_names: name the directories of slabs.
        tensors, rows, cached, slot_bytes: as for :class:`Tiers`.

    Raises:
        InUseError: another process, or another group, has the directory.
        DamagedStoreError, UnsupportedFormatError: its files are damaged, or of another version.
        RuntimeError: its files are of other tables.
    """

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
        # The thread knows addresses only: it ends before the tensors go, which this object has.
        self._end = weakref.finalize(self, ops.store_close, tensors.clock)
        if not _keeps_snapshots(Path(storage.path)):
            # rows of a run that made no snapshot cannot be read any more
            self.keep([torch.empty(0, dtype=torch.int64) for _ in slab_names])

    def reserve_space(self, index: IndexTensors, batch: ops.LookupBatch) -> None:
        ops.reserve_space_(self.tensors, index, batch)

    def stage(self, staged: ops.StagedIds, *, trains: bool) -> Tensor:
        return ops.stage_(self.tensors, staged, trains=trains)

    def lookup(self, batch: ops.LookupBatch, handles: Tensor) -> Tensor:
        return ops.staged_lookup_(self.tensors, self._rows, batch, handles)

    def prefetch(self, staged: ops.StagedIds, *, ahead: int) -> None:
        ops.prefetch_(self.tensors, staged, ahead=ahead)

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
        """Makes all rows durable, those of the cache too.

        Returns:
            What :meth:`restore` needs to come back to here. Its files stay until :meth:`keep` says
            that nobody needs them.

        Raises:
            DiskFullError: the disk is full.
            RuntimeError: the disk fails.
        """
        self.flush()
        self.drain()
        return ops.store_sync(self.tensors.clock)

    def hold(self) -> HeldRows:
        """Keeps the rows that there are now, those of the cache too, until they are released.

        Raises:
            DiskFullError: the disk is full.
            RuntimeError: the disk fails.
        """
        self.flush()
        self.drain()
        return HeldRows(self)

    def keep(self, files: Sequence[Tensor]) -> None:
        """Says which files are needed by others than the tables as they are.

        Args:
            files: int64 [files] of each slab, their numbers.

        Raises:
            RuntimeError: the disk fails.
        """
        ops.store_keep(self.tensors.clock, files)

    def restore(self, snapshot: ops.StoreSnapshot) -> None:
        """Goes back to what :meth:`sync` has given; the cache is empty then.

        Args:
            snapshot: of these files.

        Raises:
            DamagedStoreError: a file is missing or damaged: the files and the cache are as they
                were.
            RuntimeError: the disk fails.
        """
        self.drain()
        ops.store_load(self.tensors.clock, snapshot)
        self.empty()

    def erase(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> None:
        self.drain()
        self.drop(slab, handles)
        ops.store_erase(self.tensors.clock, slab, handles)


__all__ = ["KEPT_FOLDER", "SSDTiers"]
