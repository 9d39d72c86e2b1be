"""Loads the tables of a group that differs from the saved one: ids and rows fall where they may."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch_dynemb import ops
from torch_dynemb.checkpoint.loading.part import PartLoad, Stream
from torch_dynemb.checkpoint.loading.table_plan import TablePlan
from torch_dynemb.errors import HostMemoryError, NoRoomError
from torch_dynemb.ops.columns import Clock, Table
from torch_dynemb.table import content
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.load import RowLoader


class GroupLoad(ABC):
    """Loads some tables of a group.

    Args:
        group: of the tables.
        plans: of its tables that are loaded.
        stream: where from.

    Attributes:
        plans: as given.
        exact: whether every id and row gets its place back.
        loader: of the tables, after :meth:`choose`.
    """

    exact: bool

    def __init__(self, group: TableGroup, plans: Sequence[TablePlan], stream: Stream) -> None:
        self._group, self._tables, self._stream = group, group.tables, stream
        self.plans = list(plans)
        self.loader: RowLoader

    @property
    @abstractmethod
    def counts(self) -> list[int]:
        """Ids that are loaded, by plan."""

    @property
    def evicted(self) -> list[int]:
        """Ids without room, by plan."""
        return [0 for _ in self.plans]

    def choose(self) -> None:
        """Finds out which ids are loaded, and whether there is room; changes nothing.

        Raises:
            ValueError, DamagedFileError: see :meth:`PartLoad.choose`.
            RuntimeError: too few rows are reserved, or memory is short.
        """
        tables = self._tables
        counts = {plan.part.table: n for plan, n in zip(self.plans, self.counts, strict=True)}
        needed = 0
        for s, slab in enumerate(tables.config.slabs):
            rows = sum(n for table, n in counts.items() if tables.config.slab_of(table) == s)
            reserved = tables.rows.weights[s].shape[0]
            if rows > reserved:
                raise NoRoomError(
                    f"checkpoint.load: {rows} rows {slab.name!r} are to be loaded, but the model "
                    f"reserves {reserved}: construct it with a larger max_rows, capacity or budget",
                    tables=tables.config.names,
                )
            needed += rows * tables.config.row_bytes(slab) if tables.stored(s) is None else 0
        # those of the tables that are not loaded stay
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
        """Whether what is read goes together, before anything is replaced.

        Raises:
            ValueError, DamagedFileError: it does not.
        """

    @abstractmethod
    def stream(self) -> None:
        """Reads rows into unused rows.

        Raises:
            DamagedFileError: a file is damaged.
            ValueError: rows or state of them are such as nobody has saved.
            RuntimeError: rows lie on a disk, which has no room for them, or fails.
        """

    @abstractmethod
    def publish(self) -> None:
        """Gives the rows to their ids, while signals wait.

        Raises:
            ValueError, DamagedFileError: what was saved does not go together.
            RuntimeError: there is no room for all, or memory is short.
        """


class RowsLoad(GroupLoad):
    """Loads tables one after another: rows in the order of the files, and ids where they fall."""

    exact = False

    def __init__(self, group: TableGroup, plans: Sequence[TablePlan], stream: Stream) -> None:
        super().__init__(group, plans, stream)
        self._parts = [PartLoad(plan, stream) for plan in plans]

    @property
    def counts(self) -> list[int]:
        return [part.count for part in self._parts]

    @property
    def evicted(self) -> list[int]:
        return [part.evicted for part in self._parts]

    def choose(self) -> None:
        for part in self._parts:
            part.choose()
        super().choose()

    def check(self) -> None:
        for part in self._parts:
            part.check()

    def stream(self) -> None:
        for part in self._parts:
            part.stream(self.loader)

    def publish(self) -> None:
        tables = self._tables
        for part in self._parts:
            part.publish(self.loader)
        step = max(plan.saved.step for plan in self.plans)
        now = max(plan.saved.now for plan in self.plans)
        if len(self.plans) < len(tables.config.tables):
            step = max(step, int(tables.index.clock[Clock.STEP]))
            now = max(now, int(tables.index.clock[Clock.NOW]))
        tables.index.clock[Clock.STEP] = step
        if tables.config.keeps_time:
            self._group.clock.set_now(now)
        for plan in self.plans:
            sources = plan.sources if plan.keeps_steps else []
            steps = max((part.optimizer_steps for part in sources), default=0)
            content.set_optimizer_steps(tables, plan.part.table, steps)
        self.loader.end()


__all__ = ["GroupLoad", "RowsLoad"]
