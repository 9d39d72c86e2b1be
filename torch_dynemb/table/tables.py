"""The tables of a group as one record: their settings and their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb._library.error_names import know_names
from torch_dynemb._library.finalizers import finalize
from torch_dynemb.argument_checks import flat_int64
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    BUCKET_WORDS,
    TABLES_REPLACED,
    RowClock,
    Slab,
    Table,
)
from torch_dynemb.ops.pending import PendingGradients
from torch_dynemb.ops.tensors import IndexTensors, RowTensors
from torch_dynemb.process.forked import check_own
from torch_dynemb.storage.memory import TableMemory
from torch_dynemb.storage.tiers.tiers import Tiers
from torch_dynemb.table.group_config import SLOT_BYTES, TIERED_ROW_BYTES, GroupConfig
from torch_dynemb.table.host_state import EvictionRecords, HostState

# the remedy in messages, for rows that are too many to copy
STREAM = (
    "save the model with torch_dynemb.checkpoint.save, which streams them, and load that "
    "checkpoint elsewhere"
)


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of a group. The functions of this package are operations on them.

    Attributes:
        config: settings of the tables.
        memory: of their device.
        index: their ids.
        rows: of these ids.
        host: state that kernels do not read.
        evictions: settings of the records of evicted ids.
        one_bag: int64 [0], the offsets of a call with one feature without pooling.
        tiers: the cache and the store of tiered rows; None: all rows are in memory.
        read_by_one_op: whether ``find_and_read`` does a whole lookup for inference.
        trained_by_one_op: whether ``insert_and_read`` does that of a training lookup.
    """

    config: GroupConfig
    memory: TableMemory
    index: IndexTensors
    rows: RowTensors
    host: HostState
    evictions: EvictionRecords
    one_bag: Tensor
    tiers: Tiers | None = None
    read_by_one_op: bool = field(init=False)
    trained_by_one_op: bool = field(init=False)
    _bound: int | None = field(init=False, default=None)
    _row_lookup: ops.RowLookup | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        in_memory = (
            self.one_bag.is_cpu
            and self.index.meta is self.rows.meta  # no counters
            and self.tiers is None
        )
        read = in_memory and "expiry" not in self.config.layout.score_words
        object.__setattr__(self, "read_by_one_op", read)
        custom = any(table.policy.custom is not None for table in self.config.tables)
        alone = not any(self.config.hooked) and not custom and self.evictions.rows is None
        object.__setattr__(self, "trained_by_one_op", in_memory and alone)
        for meta in (self.index.meta, self.rows.meta):
            know_names(meta, self.config.names)

    def bound(self) -> int:
        """Return the number of these tensors for ``insert_and_embed``."""
        if self._bound is not None:
            return self._bound
        number = ops.bind_lookup(self.index, self.rows)
        finalize(self, ops.release_lookup, number).atexit = False
        object.__setattr__(self, "_bound", number)
        return number

    def row_lookup(self) -> ops.RowLookup | None:
        """Return a training lookup of rows of the one table; None: it is more than one op."""
        if self._row_lookup is not None:
            return self._row_lookup
        config = self.config
        if not self.trained_by_one_op or len(config.tables) != 1 or config.layout.rows:
            return None
        code = config.optimizer_code
        lookup = ops.row_lookup(self.rows, self.bound(), self.one_bag, optimizer=code)
        object.__setattr__(self, "_row_lookup", lookup)
        return lookup

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.memory.device

    def tensors(self) -> list[Tensor]:
        """Return all tensors; none of them ever changes its shape or address."""
        index, rows = self.index, self.rows
        result = [index.buckets, index.scores, index.tables, index.slabs, index.free_rows]
        result += [index.clock, index.sketch, index.evicted]
        result += [*rows.weights, *rows.generations, *rows.state, *rows.dirty_bits]
        result += [*rows.copy_on_write, rows.row_clock, *rows.pending]
        if self.tiers is not None:
            places, slots, free_slots, clock = self.tiers.tensors
            result += [*places, *slots, *free_slots, clock]
        return [*result, rows.hyper, index.meta, rows.meta, rows.init_data, index.policy]

    def check_own(self) -> None:
        """Raise RuntimeError in a process that inherited the tables by a fork."""
        check_own(self.host)

    def lock_words(self) -> list[Tensor]:
        """Return the tensors that an op of the CPU locks while it changes the tables."""
        words = [self.index.tables, *self.rows.weights[:1]]
        if self.rows.pending:
            words.append(PendingGradients.of(self.rows.pending).counts)
        return words

    @contextmanager
    def changing(self, *, moves_rows: bool = False) -> Iterator[None]:
        """Keep other threads from changing the tables while this one does, in several steps.

        Args:
            moves_rows: ids get other rows, or all rows are replaced: no thread may look them up.

        Raises:
            InUseError: another thread is changing the tables now.
            ForkedProcessError: this process inherited the tables by a fork.
        """
        self.check_own()
        with ops.locked(self.lock_words(), moves_rows=moves_rows):
            yield

    def _retire(self) -> None:
        """Make backwards of these tables raise RuntimeError, after others have replaced them."""
        clock = self.rows.row_clock.data  # .data: the op raises, not autograd
        clock[len(self.config.tables) + RowClock.UPDATES] = TABLES_REPLACED

    def stored(self, slab: int) -> Tiers | None:
        """Return the tiers of a slab's rows, or None if they are in ``rows``.

        Args:
            slab: its number.
        """
        return self.tiers if self.tiers is not None and self.tiers.holds(slab) else None

    def check_in_memory(self, call: str, remedy: str = STREAM) -> None:
        """Raise RuntimeError if rows are in a store beneath memory.

        Args:
            call: the function that needs them in memory.
            remedy: for the message.
        """
        names = [
            table.name
            for number, table in enumerate(self.config.tables)
            if self.stored(self.config.slab_of(number)) is not None
        ]
        if names:
            where = "are in a store and need not fit in memory"
            if self.config.caches_hosted:
                where = "are in host memory beneath a cache, HostStore(cache=...)"
            raise RuntimeError(f"{call}: the rows of {names} {where}: {remedy}")

    def rows_in_memory(self, slab: int) -> int:
        """Return the number of rows and slots that a slab has memory for; waits for a GPU.

        Args:
            slab: its number.
        """
        stored, used = self.stored(slab), self.index.used_rows(slab)
        return used if stored is None else stored.rows_in_memory(slab, used)

    def reserved_rows(self, slab: int) -> int:
        """Return the number of rows that a slab may have.

        Args:
            slab: its number.
        """
        stored = self.stored(slab)
        return self.rows.weights[slab].shape[0] if stored is None else stored.most_rows(slab)

    def wait_until_read(self) -> None:
        """Wait until a save in the background has read the rows, before they move or are removed.

        Updates and writes of single rows need not wait.
        """
        if self.host.rows_read is not None and not self.host.forked:
            self.host.rows_read.wait()

    def release_memory(self) -> None:
        """Give back memory that the tables do not use."""
        kept = [self.index.used_rows(slab) for slab in range(len(self.config.slabs))]
        for slab, used in enumerate(kept):
            stored = self.stored(slab)
            kept[slab] = used if stored is None else stored.kept_rows(slab, used)
        self.memory.release(self.index, self.rows, kept)

    def bind_memory(self) -> None:
        """Provide memory after counts were written from outside; see :meth:`TableMemory.bind`."""
        self.memory.bind(self.index, self.rows)


def one_table(
    tables: Tables, table: int, ids: Tensor, call: str = "TableGroup"
) -> tuple[Tensor, Tensor, list[int]]:
    """Return ids, offsets and the table of one feature, as arguments of ops.

    Raises:
        TypeError, ValueError: ids are not int64 on the device of the tables; the message begins
            with ``call``.
    """
    return flat_int64(f"{call}: ids", ids, tables.device), tables.one_bag, [table]


def exported(tables: Tables, table: int, batch_size: int) -> Iterator[ops.ExportedBatch]:
    """Yield all ids of a table with handles and scores.

    Ids of past batches may be erased during the iteration.
    """
    begin = 0
    while begin >= 0:
        batch = ops.export_batch(tables.index, table=table, begin=begin, max_ids=batch_size)
        begin = int(batch.next)
        if batch.ids.numel() > 0:
            yield batch


def used_bytes(tables: Tables) -> dict[str, int]:
    """Return bytes in use: ``rows`` (with generations), ``state``, ``index``, ``total``."""
    config, index = tables.config, tables.index
    rows = state = tiered = 0
    for s, slab in enumerate(config.slabs):
        of_row = config.state_bytes(slab)
        used = index.used_rows(s)
        stored = tables.stored(s)
        if stored is not None:
            tiered += used * TIERED_ROW_BYTES + stored.used_slots(s) * SLOT_BYTES
            used = stored.rows_in_memory(s, used)
        rows += used * (config.row_bytes(slab) - of_row)
        state += used * of_row
    buckets = index.tables[:, Table.BUCKET_COUNT]
    scored = int(buckets[: len(config.tables)].sum())
    of_index = 8 * BUCKET_WORDS * int(buckets.sum()) + 8 * int(
        index.slabs[:, Slab.FREE_COUNT].sum()
    )
    of_index += 8 * BUCKET_WIDTH * len(config.layout.score_words) * scored
    of_index += 4 * index.sketch.numel() + tiered
    return {"rows": rows, "state": state, "index": of_index, "total": rows + state + of_index}


__all__ = ["Tables", "exported", "one_table", "used_bytes"]
