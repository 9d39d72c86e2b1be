"""Statistics of tables: sizes, counters and memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

from torch_dynemb import ops
from torch_dynemb.argument_checks import described, integer
from torch_dynemb.ops.columns import BUCKET_WIDTH, BUCKET_WORDS, RowClock, Table
from torch_dynemb.storage.tiers import StorageStats
from torch_dynemb.table.tables import Tables, used_bytes


class ScalarWriter(Protocol):
    """Interface of ``torch.utils.tensorboard.SummaryWriter`` and similar writers."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Log one number.

        Args:
            tag: its name, ``table/name``.
            scalar_value: the number.
            global_step: its step.
        """


@dataclass(frozen=True)
class TableStats:
    """Sizes and counters of a table.

    Attributes:
        size: ids with a row.
        capacity: maximal number of ids; 0: limited by memory alone.
        slots: places for ids in the index, used or not.
        load: size / slots; the index grows beyond 0.7.
        inserted: ids that have ever got a row.
        found: ids of training lookups with a row; every occurrence counts. Without policies,
            activation checkpointing's second lookup counts, too.
        missed: ids of training lookups without a row, except padding.
        evicted: ids evicted for others.
        rejected: new ids without room, once per lookup.
        not_admitted: new ids without admission, once per lookup.
        default_served: ids that training lookups served without a row; every occurrence counts.
        stale: gradients dropped because their id had lost its row; of the whole group.
        removed: ids that have been erased or removed.
        growths: rehashes of the index.
        tombstones: places of removed ids that probes still have to pass.
        counted: ids without a row that have an exact count.
        index_bytes: of the table's index, with scores.
        counter_bytes: of the counts of admission.
        row_bytes: of the rows of its ids, with generations and optimizer state, in memory or in a
            store.
    """

    size: int
    capacity: int
    slots: int
    load: float
    inserted: int
    found: int
    missed: int
    evicted: int
    rejected: int
    not_admitted: int
    default_served: int
    stale: int
    removed: int
    growths: int
    tombstones: int
    counted: int
    index_bytes: int
    counter_bytes: int
    row_bytes: int

    def as_dict(self) -> dict[str, float]:
        """Return all figures by name, for loggers."""
        return asdict(self)


class Usage:
    """Sizes, counters and memory of the tables of a group: ``group.usage``.

    Args:
        tables: of the group.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def tables(self, *, wait: bool = False) -> dict[str, TableStats]:
        """Return the sizes and counters of each table, by name.

        Args:
            wait: True: wait for the device, to count everything until now. False: do not wait; on a
                GPU the figures are those of the last finished ``optimizer.step()``, which may be a
                step or two behind.
        """
        tables = self._tables
        counts, row_clock = tables.index.tables, tables.rows.row_clock
        if not wait:
            counts, row_clock = ops.reported_counts(tables.index, tables.rows)
        line = 8 * (BUCKET_WORDS + BUCKET_WIDTH * len(tables.config.layout.score_words))
        rows = counts.tolist()
        stale = int(row_clock[len(tables.config.tables) + RowClock.STALE])
        sketch = 4 * sum(cells for _, cells, _ in tables.config.layout.sketches)
        result = {}
        for t, table in enumerate(tables.config.tables):
            row = rows[t]
            number = tables.config.layout.counters[t]
            counters = None if number is None else rows[number]
            slots = row[Table.BUCKET_COUNT] * BUCKET_WIDTH
            result[table.name] = TableStats(
                size=row[Table.SIZE],
                capacity=tables.config.capacity_bound(t) or 0,
                slots=slots,
                load=row[Table.SIZE] / slots,
                inserted=row[Table.INSERTED],
                found=row[Table.FOUND],
                missed=row[Table.MISSED],
                evicted=row[Table.EVICTED],
                rejected=row[Table.REJECTED],
                not_admitted=row[Table.NOT_ADMITTED],
                default_served=row[Table.DEFAULT_SERVED],
                stale=stale,
                removed=row[Table.ERASED],
                growths=row[Table.GROWTHS],
                tombstones=row[Table.TOMBSTONES],
                counted=0 if counters is None else counters[Table.SIZE],
                index_bytes=line * row[Table.BUCKET_COUNT],
                counter_bytes=sketch
                if counters is None
                else 8 * BUCKET_WORDS * counters[Table.BUCKET_COUNT],
                row_bytes=tables.config.row_bytes(table.slab) * row[Table.SIZE],
            )
        return result

    def memory(self) -> dict[str, int]:
        """Return bytes in use: ``rows`` (with generations), ``state``, ``index``, ``total``.

        ``index`` includes scores and counts of admission. Of rows in a store, only cached ones
        count.
        """
        return used_bytes(self._tables)

    def split_rows(self) -> dict[str, int]:
        """Return the bytes that are mapped for rows with a ``HostStore``, by place.

        Returns:
            ``hbm`` and ``host``: bytes of weights and optimizer state, with rows not yet in use;
            both 0 on the CPU, and without a :class:`torch_dynemb.HostStore`.
        """
        hbm, host = self._tables.memory.split_bytes(self._tables.index)
        return {"hbm": hbm, "host": host}

    def storage(self) -> StorageStats | None:
        """Return counters of the cache and the store of tiered tables; None: no table is tiered."""
        if self._tables.tiers is None:
            return None
        self._tables.check_own()
        self._tables.memory.wait_beside()
        return self._tables.tiers.stats()

    def stale_gradients(self) -> int:
        """Return the number of gradients dropped because their id had lost its row."""
        tables = self._tables
        return int(tables.rows.row_clock[len(tables.config.tables) + RowClock.STALE])

    def log_to(self, writer: ScalarWriter, step: int | None = None) -> None:
        """Write :meth:`tables` to a ``torch.utils.tensorboard.SummaryWriter``, as ``table/name``.

        Args:
            writer: any object with such an ``add_scalar``.
            step: default: the number of ``optimizer.step()`` so far.

        Raises:
            TypeError: ``writer`` has no ``add_scalar``, or ``step`` is not an int.
        """
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                f"usage.log_to: writer is {described(writer)}, expected one with add_scalar, such "
                "as torch.utils.tensorboard.SummaryWriter"
            )
        steps = self._tables.host.steps
        at = steps if step is None else integer("usage.log_to: step", step)
        for table, values in self.tables().items():
            for name, value in values.as_dict().items():
                writer.add_scalar(f"{table}/{name}", value, at)


__all__ = ["ScalarWriter", "TableStats", "Usage"]
