"""Rows in a store, read piece by piece by a save."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torch_dynemb.storage.tiers.tiers import PinnedRecords
from torch_dynemb.table.row_access import read_records, read_rows
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.tables import Tables


class StoredRows:
    """Rows of a group in a store: current rows, or rows as of the time they were pinned.

    Args:
        tables: tables of the group.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._pinned: PinnedRecords | None = None

    def copied_bytes(self, slab: int) -> int:
        """Return the bytes of memory that :meth:`pin` takes for a slab.

        Args:
            slab: number of the slab.
        """
        tiers = self._tables.tiers
        return 0 if tiers is None else tiers.copied_bytes(slab)

    def pin(self) -> None:
        """Pin the rows: later reads return them as they are now, also from another thread.

        Raises:
            RuntimeError: the disk is full, or fails.
            HostMemoryError: there is too little memory for copies of rows beneath a GPU's cache.
        """
        tiers, rows, index = self._tables.tiers, self._tables.rows, self._tables.index
        assert tiers is not None  # as save() has checked
        # inputs for the initial values of unwritten rows, in host memory
        small = rows._replace(
            weights=[_no_rows(tensor) for tensor in rows.weights],
            state=[_no_rows(tensor) for tensor in rows.state],
            hyper=rows.hyper.cpu().clone(),
            meta=rows.meta.cpu().clone(),
            init_data=rows.init_data.cpu().clone(),
        )
        of_index = index._replace(tables=index.tables.cpu())
        pinned = tiers.pin()
        self._tables = replace(self._tables, rows=small, index=of_index)
        self._pinned = pinned

    def release(self) -> None:
        """Unpin the rows, if they are pinned."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.release()

    def read(self, table: int, ids: Tensor, handles: Tensor) -> RowBatch:
        """Copy rows. Unwritten rows have their initial values.

        Args:
            table: number of the table.
            ids: int64 [n].
            handles: int64 [n], of the ids.

        Raises:
            RuntimeError: a row is damaged, or cannot be read.
        """
        if self._pinned is not None:
            return read_records(self._tables, self._pinned, table, ids, handles)
        device = self._tables.device
        return read_rows(self._tables, table, ids.to(device), handles.to(device)).to("cpu")


def _no_rows(tensor: Tensor) -> Tensor:
    return torch.empty(0, *tensor.shape[1:], dtype=tensor.dtype, device="cpu")


__all__ = ["StoredRows"]
