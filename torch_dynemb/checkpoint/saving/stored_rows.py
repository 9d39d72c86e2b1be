"""Rows in a store, read piece by piece by a save."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from torch_dynemb.storage.tiers.pinned_rows import PinnedRows
from torch_dynemb.storage.tiers.store_files import StoreFiles
from torch_dynemb.table.row_access import RowValues, read_records, read_rows
from torch_dynemb.table.tables import Tables


class StoredRows:
    """Rows of a group in a store: current rows, or rows as of the time they were pinned.

    Args:
        tables: tables of the group.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._pinned: PinnedRows | None = None

    def pin(self) -> None:
        """Pin the rows: later reads return them as they are now, also from another thread.

        Raises:
            RuntimeError: the disk is full, or fails.
        """
        tiers, rows = self._tables.tiers, self._tables.rows
        assert isinstance(tiers, StoreFiles)  # as save() has checked
        # inputs for the initial values of unwritten rows
        small = rows._replace(
            hyper=rows.hyper.clone(), meta=rows.meta.clone(), init_data=rows.init_data.clone()
        )
        pinned = tiers.pin()
        self._tables, self._pinned = replace(self._tables, rows=small), pinned

    def release(self) -> None:
        """Unpin the rows, if they are pinned."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.release()

    def read(self, table: int, ids: Tensor, handles: Tensor) -> RowValues:
        """Copy rows. Unwritten rows have their initial values.

        Args:
            table: number of the table.
            ids: int64 [n].
            handles: int64 [n], of the ids.

        Raises:
            RuntimeError: a row is damaged, or cannot be read.
        """
        if self._pinned is None:
            return read_rows(self._tables, table, ids, handles)
        return read_records(self._tables, self._pinned, table, ids, handles)


__all__ = ["StoredRows"]
