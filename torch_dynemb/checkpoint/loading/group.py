"""Loads the tables of a group: exactly as they stood where they are the ones that were saved.

A group whose tables, shards and policies are those of a saved group gets every id and every row
back in its place, so that training goes on bit for bit, evictions included. Any other group gets
rows one after another, and its ids where they fall.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_dynemb import ops
from torch_dynemb.checkpoint.loading.before import Before
from torch_dynemb.checkpoint.loading.exact import ExactLoad, saved_group_of
from torch_dynemb.checkpoint.loading.part import PartLoad, Stream
from torch_dynemb.checkpoint.loading.table_plan import TablePlan
from torch_dynemb.checkpoint.manifest.records import Manifest
from torch_dynemb.errors import HostMemoryError, NoRoomError
from torch_dynemb.ops.columns import SKETCH_ROWS, Clock, PolicyColumn, Slab, Table
from torch_dynemb.process.interrupts import held_back
from torch_dynemb.table import compaction, content
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.row_access import first_generation
from torch_dynemb.table.state import recount


class GroupLoad:
    """Loads some tables of a group.

    Args:
        group: of the tables.
        plans: of its tables that are loaded.
        manifest: of the checkpoint.
        stream: where from.

    Attributes:
        plans: as given.
        exact: whether every id and row gets its place back.
        cleared: whether something has been taken away.
    """

    def __init__(
        self, group: TableGroup, plans: Sequence[TablePlan], manifest: Manifest, stream: Stream
    ) -> None:
        self._group, self.plans = group, list(plans)
        self._parts = [PartLoad(plan, stream) for plan in plans]
        saved = saved_group_of(group, plans, manifest)
        self._exact = (
            None if saved is None else ExactLoad(group, plans, manifest.groups[saved], stream)
        )
        self.exact = self._exact is not None
        self._filled = is_filled(group, plans, manifest)
        self._before: Before | None = None
        self.cleared = False

    @property
    def evicted(self) -> list[int]:
        """Ids without room, by plan."""
        return [part.evicted for part in self._parts]

    @property
    def counts(self) -> list[int]:
        """Ids that are loaded, by plan."""
        if self._exact is not None:
            return self._exact.counts
        return [part.count for part in self._parts]

    def choose(self) -> None:
        """Finds out which ids are loaded, and whether there is room; changes nothing.

        Raises:
            ValueError, DamagedFileError: see :meth:`PartLoad.choose`.
            RuntimeError: too few rows are reserved, or memory is short.
        """
        tables = self._group.tables
        if self._exact is None:
            for part in self._parts:
                part.choose()
        # those of the tables that are not loaded stay
        kept = [
            int(tables.index.tables[t, Table.SIZE])
            for t in range(len(tables.config.tables))
            if t not in [plan.part.table for plan in self.plans]
        ]
        needed = 0
        for s, slab in enumerate(tables.config.slabs):
            rows = sum(
                count
                for count, plan in zip(self.counts, self.plans, strict=True)
                if tables.config.slab_of(plan.part.table) == s
            )
            reserved = tables.rows.weights[s].shape[0]
            if rows > reserved:
                raise NoRoomError(
                    f"checkpoint.load: {rows} rows {slab.name!r} are to be loaded, but the model "
                    f"reserves {reserved}: construct it with a larger max_rows, capacity or budget",
                    tables=tables.config.names,
                )
            needed += rows * tables.config.row_bytes(slab) if tables.stored(s) is None else 0
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

    def check(self) -> None:
        """Whether what is read goes together, before anything is replaced.

        Raises:
            ValueError, DamagedFileError: it does not.
        """
        if self._exact is not None:
            self._exact.check()
        else:
            for part in self._parts:
                part.check()

    def clear(self) -> None:
        """Takes away what the tables have."""
        if not self._filled:
            return
        self.cleared = True
        tables = self._group.tables
        with held_back():
            for plan in self.plans:
                content.clear(tables, plan.part.table)
            compaction.compact(tables)

    def stream(self) -> None:
        """Reads rows into unused rows.

        Raises:
            DamagedFileError: a file is damaged.
        """
        tables = self._group.tables
        if self._exact is not None:
            self._exact.stream()
            return
        next_row = tables.index.slabs[:, Slab.NEXT_ROW].tolist()
        begins = []
        for part in self._parts:
            begins.append(next_row[part.slab])
            next_row[part.slab] += part.count
        tables.memory.bind(tables.index, tables.rows, slab_rows=next_row)
        for part, begin in zip(self._parts, begins, strict=True):
            part.stream(begin)

    def publish(self) -> None:
        """Gives the rows to their ids, while signals wait; it fails as a whole.

        Raises:
            ValueError, DamagedFileError: what was saved does not go together.
            RuntimeError: there is no room for all, or memory is short.
        """
        tables = self._group.tables
        with held_back():
            self._before = Before(tables, [plan.part.table for plan in self.plans])
            try:
                if self._exact is not None:
                    self._exact.publish()
                else:
                    self._publish()
                    content.begin_step(tables)
                recount(tables)
            except BaseException:
                self.give_back()
                raise

    def _publish(self) -> None:
        tables = self._group.tables
        index = tables.index
        whole = len(self.plans) == len(tables.config.tables)
        free = index.slabs[:, Slab.FREE_COUNT].clone()
        index.slabs[:, Slab.FREE_COUNT] = 0  # so that new ids get the rows that were read
        tables.bind_memory()
        # by slab and row: each part begins where the one before has ended
        for part in self._parts:
            part.publish()
        index.slabs[:, Slab.FREE_COUNT] = free
        step = max(plan.saved.step for plan in self.plans)
        now = max(plan.saved.now for plan in self.plans)
        if not whole:
            step = max(step, int(index.clock[Clock.STEP]))
            now = max(now, int(index.clock[Clock.NOW]))
        index.clock[Clock.STEP] = step
        if tables.config.keeps_time:
            self._group.clock.set_now(now)
        for plan in self.plans:
            sources = plan.sources if plan.keeps_steps else []
            steps = max((part.optimizer_steps for part in sources), default=0)
            content.set_optimizer_steps(tables, plan.part.table, steps)
        tables.bind_memory()

    def give_back(self) -> None:
        """After a failure: rows that were read are unused, and ids that came are gone."""
        tables = self._group.tables
        if self._before is not None:
            self._before.put_back()
            self._before = None
        for s in range(len(tables.config.slabs)):
            if tables.stored(s) is not None:
                # what has been written under handles that nobody has must never be found
                newest = 0 if self._exact is None else self._exact.newest[s]
                newest = max(newest, first_generation(tables, s))
                tables.index.slabs[s, Slab.GENERATION] = newest
        tables.release_memory()


def is_filled(group: TableGroup, plans: Sequence[TablePlan], manifest: Manifest) -> bool:
    """Whether there is something in tables that a load replaces, or that ids have left.

    Args:
        group: of the tables.
        plans: of its tables that are loaded.
        manifest: of the checkpoint.
    """
    index, layout = group.index, group.config.layout
    own = [plan.part.table for plan in plans]
    numbers = [*own, *(of for of in (layout.counters[n] for n in own) if of is not None)]
    columns = [Table.SIZE, Table.TOMBSTONES]
    if any(int(index.tables[number, columns].sum()) > 0 for number in numbers):
        return True
    if saved_group_of(group, plans, manifest) is not None:
        return int(index.slabs[:, Slab.NEXT_ROW].sum()) > 0 or bool(index.sketch.any())
    for number in own if layout.rows else []:
        begin = layout.rows[number].get(PolicyColumn.SKETCH_BEGIN, 0)
        width = layout.rows[number].get(PolicyColumn.SKETCH_WIDTH, 0)
        if bool(index.sketch[begin : begin + SKETCH_ROWS * width].any()):
            return True
    return False


__all__ = ["GroupLoad", "is_filled"]
