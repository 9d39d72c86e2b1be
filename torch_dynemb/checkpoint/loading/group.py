"""Loading of the tables of a group that differs from the saved one: ids and rows get new places."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch_dynemb import ops
from torch_dynemb.checkpoint.loading.part import PartLoad, Stream
from torch_dynemb.checkpoint.loading.table_plan import TablePlan
from torch_dynemb.errors import HostMemoryError, NoRoomError
from torch_dynemb.ops.columns import Table
from torch_dynemb.rows.into_part import publish_all
from torch_dynemb.rows.loader import RowLoader
from torch_dynemb.table.group import TableGroup


class GroupLoad(ABC):
    """Loader of some tables of a group.

    Args:
        group: group of the tables.
        plans: plans of the tables that are loaded.
        stream: access to the files.

    Attributes:
        plans: as given.
        exact: whether every id and row gets its place back.
        loader: row loader of the tables, after :meth:`choose`.
    """

    exact: bool

    def __init__(self, group: TableGroup, plans: Sequence[TablePlan], stream: Stream) -> None:
        self._group, self._tables, self._stream = group, group.tables, stream
        self.plans = list(plans)
        self.loader: RowLoader

    @property
    @abstractmethod
    def counts(self) -> list[int]:
        """Number of loaded ids, by plan."""

    @property
    def evicted(self) -> list[int]:
        """Number of ids without room, by plan."""
        return [0 for _ in self.plans]

    def choose(self) -> None:
        """Choose the ids to load, and check that there is room. Changes nothing.

        Raises:
            ValueError, DamagedFileError: see :meth:`PartLoad.choose`.
            RuntimeError: too few rows are reserved, or there is too little memory.
        """
        tables = self._tables
        counts = {plan.part.table: n for plan, n in zip(self.plans, self.counts, strict=True)}
        needed = 0
        for s, slab in enumerate(tables.config.slabs):
            rows = sum(n for table, n in counts.items() if tables.config.slab_of(table) == s)
            reserved = tables.reserved_rows(s)
            if rows > reserved:
                raise NoRoomError(
                    f"checkpoint.load: {rows} rows were saved for {slab.name!r}, but the model "
                    f"reserves {reserved}: construct it with a larger max_rows, capacity or budget",
                    tables=tables.config.names,
                )
            needed += rows * tables.config.row_bytes(slab) if tables.stored(s) is None else 0
        # ids of tables that are not loaded stay
        kept = [
            int(tables.index.tables[table, Table.SIZE])
            for table in range(len(tables.config.tables))
            if table not in counts
        ]
        if sum(kept) == 0 and tables.device.type == "cpu":
            free = ops.available_memory() + sum(
                tables.rows_in_memory(s) * tables.config.row_bytes(slab)
                for s, slab in enumerate(tables.config.slabs)
            )
            if needed > free:
                raise HostMemoryError(
                    f"checkpoint.load: the rows take {needed} bytes, but {free} bytes of memory "
                    "are free",
                    tables=tables.config.names,
                )
        self.loader = RowLoader(tables, counts, in_place=self.exact)

    @abstractmethod
    def check(self) -> None:
        """Check that the files are consistent, before anything is replaced.

        Raises:
            ValueError, DamagedFileError: they are not.
        """

    @abstractmethod
    def stream(self) -> None:
        """Stream rows into unused rows.

        Raises:
            DamagedFileError: a file is damaged.
            ValueError: rows or their state have values that no save writes.
            RuntimeError: rows lie on a disk, which is full or fails.
        """

    @abstractmethod
    def publish(self) -> None:
        """Publish the ids with their rows, while signals are deferred.

        Raises:
            ValueError, DamagedFileError: the files are inconsistent.
            RuntimeError: there is too little room or memory.
        """


class RowsLoad(GroupLoad):
    """Loader of tables one after another: rows in file order, ids at new places."""

    exact = False

    def __init__(self, group: TableGroup, plans: Sequence[TablePlan], stream: Stream) -> None:
        super().__init__(group, plans, stream)
        self._parts = [PartLoad(plan, stream) for plan in plans]

    @property
    def counts(self) -> list[int]:
        return [part.into.count for part in self._parts]

    @property
    def evicted(self) -> list[int]:
        return [part.evicted for part in self._parts]

    def choose(self) -> None:
        for part in self._parts:
            part.choose()
        super().choose()
        for part in self._parts:
            part.into.loader = self.loader

    def check(self) -> None:
        for part in self._parts:
            part.check()

    def stream(self) -> None:
        for part in self._parts:
            part.stream()

    def publish(self) -> None:
        publish_all(part.into for part in self._parts)


__all__ = ["GroupLoad", "RowsLoad"]
