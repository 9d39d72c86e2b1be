"""Rows in a store, which a save reads piece by piece."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from torch_dynemb.storage.tiers.held_rows import HeldRows
from torch_dynemb.storage.tiers.ssd import SSDTiers
from torch_dynemb.table.row_access import RowValues, read_records, read_rows
from torch_dynemb.table.tables import Tables


class StoredRows:
    """The rows of a group that lie in a store: as they are, or as they were when they were held.

    Args:
        tables: of the group.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._held: HeldRows | None = None

    def hold(self) -> None:
        """From now on the rows are read as they are now, by another thread than that which trains.

        Raises:
            RuntimeError: the disk is full, or fails.
        """
        tiers, rows = self._tables.tiers, self._tables.rows
        assert isinstance(tiers, SSDTiers)  # as save() has checked
        # what rows that nobody has written begin with
        small = rows._replace(
            hyper=rows.hyper.clone(), meta=rows.meta.clone(), init_data=rows.init_data.clone()
        )
        held = tiers.hold()
        self._tables, self._held = replace(self._tables, rows=small), held

    def release(self) -> None:
        """Ends :meth:`hold`, if it has begun: the store need not keep the rows any longer."""
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def read(self, table: int, ids: Tensor, handles: Tensor) -> RowValues:
        """Copies of rows; those that nobody has written have the values that they start with.

        Args:
            table: that the ids are of.
            ids: int64 [n].
            handles: int64 [n], of the ids.

        Raises:
            RuntimeError: a row is damaged, or cannot be read.
        """
        if self._held is None:
            return read_rows(self._tables, table, ids, handles)
        return read_records(self._tables, self._held, table, ids, handles)


__all__ = ["StoredRows"]
