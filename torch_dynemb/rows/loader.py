"""The loader of rows from outside: checkpoints, state dicts, files of other libraries.

Steps:

1. :meth:`RowLoader.begin`: if the tables have ids, copy their content and clear them. Choose rows
   without an id, behind all others.
2. :meth:`RowLoader.write`: write weights and state to these rows.
3. :meth:`RowLoader.publish`: insert the ids, which get the written rows.
4. :meth:`RowLoader.end`, or after an error :meth:`RowLoader.undo`.

Layout of a slab during a load::

    [ rows of other ids | rows of table 1 | rows of table 2 | reserved ... ]
                        ^ begin_of(1)     ^ begin_of(2)

Invariants:

* Until an id is published, no lookup sees its row. So an error of the source changes nothing
  visible.
* An error restores cleared tables if memory has room for both contents; else they are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import NoRoomError
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    BUCKET_WORDS,
    GENERATION_BITS,
    GENERATION_MASK,
    SKETCH_ROWS,
    PolicyColumn,
    RowClock,
    Slab,
    Table,
)
from torch_dynemb.policy.admission import AdmitFrequent, AdmitFrequentSketch
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.rows.before import Before
from torch_dynemb.table import compaction, removal, row_access
from torch_dynemb.table.content import CountedIds, score_names
from torch_dynemb.table.narrowing import check_batch_narrowed
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.state import recount
from torch_dynemb.table.tables import Tables, exported, one_table, used_bytes
from torch_dynemb.table.waiting_counts import write_counts

_IDS_AT_ONCE = 1 << 20
_INDEX_BYTES = 2 * 8 * BUCKET_WORDS // BUCKET_WIDTH  # per id, in an index that is half full


class RowLoader:
    """Replacement of the content of some tables of a group; see the module.

    Call :meth:`begin` first, then :meth:`write` for all columns of all rows, :meth:`publish` for
    each table in the order of ``counts``, and :meth:`end`. After an error call :meth:`undo`.
    Other threads can neither change nor look up the tables until :meth:`unlock`.

    Args:
        tables: of the group.
        counts: number of ids that each table gets, by number of the table.
        in_place: True: ids and rows go to the places that they had in another group. The caller
            writes and publishes them.

    Attributes:
        replaces: whether content must be removed first.
        keeps: whether an error leaves the tables unchanged. Otherwise they are empty afterwards:
            their rows are in a store, or memory has no room for both contents.
        newest: by slab, the newest generation of handles that a caller with ``in_place`` has
            written rows to a store under.
    """

    def __init__(
        self, tables: Tables, counts: Mapping[int, int], *, in_place: bool = False
    ) -> None:
        self._tables, self._counts, self._in_place = tables, dict(counts), in_place
        self._before: Before | None = None
        self._cleared = False
        self._begins: dict[int, int] = {}
        self._ends: list[int] = []
        self._scores: dict[int, dict[str, Tensor]] = {}
        self._lock = ExitStack()
        self._begun = False
        self.newest = [0] * len(tables.config.slabs)
        self.replaces = self._holds_anything() or self._needs_free_rows()
        self.keeps = not self.replaces or self._has_room_for_both()

    def begin(self) -> None:
        """Clear the tables and provide memory for their new rows.

        Raises:
            NoRoomError: too few rows, or too little memory.
            InUseError: another thread is changing the tables now.
            ForkedProcessError: this process is a fork of the one that made the tables.
        """
        tables = self._tables
        tables.check_own()
        tables.memory.wait_beside()
        self._lock.enter_context(tables.changing(moves_rows=True))
        self._begun = True
        with defer_signals():
            if not self.replaces or self.keeps:
                self._before = Before(tables, self._numbers(), copied=self.replaces)
            if self.replaces:
                self._clear()
            if self._before is None:
                self._before = Before(tables, self._numbers(), copied=False)
        if self._in_place:
            return
        ends = tables.index.slabs[:, Slab.NEXT_ROW].tolist()
        for table, count in self._counts.items():
            slab = tables.config.slab_of(table)
            self._begins[table] = ends[slab]
            ends[slab] += count
            if ends[slab] > tables.reserved_rows(slab):
                raise self._no_room(table)
        tables.memory.bind(tables.index, tables.rows, slab_rows=ends)
        self._ends = ends  # only memory that is there is cleared again

    def begin_of(self, table: int) -> int:
        """Return the row of a table's first id; the others follow.

        Args:
            table: its number.
        """
        return self._begins[table]

    def write(self, table: int, batch: RowBatch, places: int | Tensor) -> None:
        """Write rows before they have an id; :meth:`publish` gives them to their ids.

        Optimizer state that is missing with a row's first columns starts fresh. Scores that the
        table does not store are skipped; those that are missing start as those of new ids.

        Args:
            table: its number.
            batch: some columns of some of its rows.
            places: int64 [n], numbers of the rows among those of the table; or the number of the
                first.

        Raises:
            ValueError: a finite value is infinite in the dtype of the table.
            RuntimeError: rows are on a disk that is full, or fails.
        """
        tables, count = self._tables, batch.ids.numel()
        if count == 0:
            return
        if isinstance(places, int):
            places = torch.arange(places, places + count, device=tables.device)
        config, slab = tables.config, tables.config.slab_of(table)
        where = f"table {config.names[table]!r}"
        check_batch_narrowed(where, batch, config.slabs[slab].dtype, config.optimizer)
        generation = row_access.first_generation(tables, slab)
        row_access.write_rows(
            tables,
            table,
            batch,
            (places + self._begins[table] << GENERATION_BITS) | generation,
            next_row=tables.index.slabs[slab, Slab.NEXT_ROW],
        )
        kept = score_names(tables, table)
        for word, scores in batch.scores.items():
            if word in kept:
                of_table = self._scores.setdefault(table, {})
                if word not in of_table:
                    of_table[word] = places.new_empty(self._counts[table])
                of_table[word][places] = scores

    def publish(
        self,
        table: int,
        ids: Sequence[Tensor],
        counted: CountedIds | None = None,
        scores: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Give a table its ids, which have their rows from then on; the caller defers signals.

        Args:
            table: its number.
            ids: int64 [n] each, without duplicates, in the order of their rows.
            counted: ids below admission with their counts; None: there are none.
            scores: int64 [ids] by word, in that order; default: the scores of :meth:`write`.

        Raises:
            ValueError: an id occurs twice.
            NoRoomError: the table is full, or memory is short.
        """
        tables, index = self._tables, self._tables.index
        slab, count = tables.config.slab_of(table), self._counts[table]
        ops.grow_(index, table, count)
        if counted is not None and counted.ids.numel() > 0:
            write_counts(tables, table, counted)
        free = index.slabs[slab, Slab.FREE_COUNT].clone()
        # makes new ids take the written rows
        index.slabs[slab, Slab.FREE_COUNT] = 0
        index.slabs[slab, Slab.NEXT_ROW] = self._begins[table]
        tables.bind_memory()
        pieces = [some for of in ids for some in of.split(_IDS_AT_ONCE) if some.numel() > 0]
        done = 0
        for some in pieces:
            self._insert(table, some.to(tables.device), self._begins[table] + done)
            done += some.numel()
        if int(index.tables[table, Table.SIZE]) != count:
            raise self._twice(table)
        # last: old scores could get ids evicted during insertion
        for word, values in (self._scores.get(table, {}) if scores is None else scores).items():
            number, begin = tables.config.layout.score_words.index(word), 0
            for some in pieces:
                flat, offsets, features = one_table(tables, table, some.to(tables.device))
                part = values[begin : begin + some.numel()].to(tables.device)
                ops.set_scores_(index, flat, offsets, features, part, word=number)
                begin += some.numel()
        index.slabs[slab, Slab.FREE_COUNT] = free
        tables.bind_memory()

    def end(self) -> None:
        """End the load and update the host state.

        A backward of an earlier forward raises from then on; none is missed.
        """
        if not self._in_place:  # in place, the other group's clock was loaded
            end = len(self._tables.config.tables)
            self._tables.rows.row_clock[end + RowClock.UPDATES] += 1
            self._tables.rows.row_clock[end + RowClock.SINCE_STEP] = 0
        recount(self._tables)

    def undo(self) -> None:
        """Restore the former content, if the load has begun; see ``keeps``."""
        tables = self._tables
        if not self._begun:
            return
        with defer_signals():
            if self._before is not None:
                self._before.put_back(self._ends)
            elif self._cleared:
                self._clear()  # empty rather than half loaded
            for slab, newest in enumerate(self.newest):
                if tables.stored(slab) is not None:
                    # records under handles without an id must never be found
                    newest = max(newest, row_access.first_generation(tables, slab))
                    tables.index.slabs[slab, Slab.GENERATION] = newest
            tables.release_memory()

    def unlock(self) -> None:
        """Let other threads use the tables, after :meth:`end` or :meth:`undo`."""
        self._lock.close()

    # -- former content --------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        """Return the index tables: those to load, and their counter tables."""
        counters = [self._tables.config.layout.counters[table] for table in self._counts]
        return [*self._counts, *(number for number in counters if number is not None)]

    def _holds_anything(self) -> bool:
        """Return whether the tables have content, or traces of removed ids."""
        index, layout = self._tables.index, self._tables.config.layout
        if bool(index.tables[self._numbers()][:, [Table.SIZE, Table.TOMBSTONES]].any()):
            return True
        if self._in_place:
            return bool(index.slabs[:, Slab.NEXT_ROW].any()) or bool(index.sketch.any())
        for table in self._counts if layout.rows else ():
            begin = layout.rows[table].get(PolicyColumn.SKETCH_BEGIN, 0)
            width = layout.rows[table].get(PolicyColumn.SKETCH_WIDTH, 0)
            if bool(index.sketch[begin : begin + SKETCH_ROWS * width].any()):
                return True
        return False

    def _needs_free_rows(self) -> bool:
        """Return whether free rows must be gathered at the end to have enough."""
        tables = self._tables
        for slab, (next_row, free) in enumerate(
            tables.index.slabs[:, [Slab.NEXT_ROW, Slab.FREE_COUNT]].tolist()
        ):
            if free > 0 and next_row + self._rows_of(slab) > tables.reserved_rows(slab):
                return True
        return False

    def _rows_of(self, slab: int) -> int:
        of = self._tables.config.slab_of
        return sum(count for table, count in self._counts.items() if of(table) == slab)

    def _has_room_for_both(self) -> bool:
        tables, config = self._tables, self._tables.config
        if any(tables.stored(config.slab_of(table)) is not None for table in self._counts):
            return False
        needed = used_bytes(tables)["total"]
        if tables.device.type == "cpu":
            for slab, of_slab in enumerate(config.slabs):
                needed += self._rows_of(slab) * (config.row_bytes(of_slab) + _INDEX_BYTES)
        return needed <= ops.available_memory()

    def _clear(self) -> None:
        tables = self._tables
        self._cleared = True
        for table in self._counts:
            for batch in exported(tables, table, _IDS_AT_ONCE):
                removal.erase(tables, table, batch.ids)
            rule = tables.config.tables[table].policy.admission
            if isinstance(rule, AdmitFrequent | AdmitFrequentSketch):
                removal.reset_counts(tables, table)
        compaction.compact(tables)

    # -- ids -------------------------------------------------------------------------------------

    def _insert(self, table: int, ids: Tensor, begin: int) -> None:
        """Insert ids; the first one gets row ``begin``."""
        tables, slab = self._tables, self._tables.config.slab_of(table)
        flat, offsets, features = one_table(tables, table, ids)
        rule = tables.config.layout.assign_rows[table : table + 1]
        handles = ops.find_or_insert_(tables.index, flat, offsets, None, features, rule)
        if bool((handles < 0).any()):
            # raises the error of a GPU's kernel, if it refused the ids
            tables.memory.end_step(tables.index, tables.rows)
            raise self._no_room(table)
        rows = row_access.handle_rows(handles)
        first, last = begin, begin + ids.numel() - 1
        ascend = bool((rows[1:] > rows[:-1]).all())
        if not ascend or (int(rows[0]), int(rows[-1])) != (first, last):
            if torch.unique(ids).numel() != ids.numel():
                raise self._twice(table)
            torch.arange(first, last + 1, out=rows)
            handles = (rows << GENERATION_BITS) | (handles & GENERATION_MASK)
            ops.set_handles_(tables.index, flat, offsets, features, handles)
        del rows
        if tables.stored(slab) is None:
            tables.rows.generations[slab][first : last + 1] = handles & GENERATION_MASK
        else:
            # the store has the rows under these handles
            first = row_access.first_generation(tables, slab)
            assert bool((handles & GENERATION_MASK == first).all())
        counters = tables.config.layout.counters[table]
        if counters is not None:  # ids with a row are not counted any more
            ops.erase_(tables.index, flat, offsets, [counters])

    def _no_room(self, table: int) -> NoRoomError:
        name = self._tables.config.names[table]
        return NoRoomError(
            f"table {name!r} has no room for {self._counts[table]} ids: give it a larger capacity, "
            "max_rows or memory budget",
            tables=[name],
        )

    def _twice(self, table: int) -> ValueError:
        return ValueError(f"table {self._tables.config.names[table]!r} was saved with an id twice")


@contextmanager
def undone_after_error(loaders: Iterable[RowLoader]) -> Iterator[Callable[[], None]]:
    """Roll loads back after an error or an interrupt in the context; unlock the tables at its end.

    Args:
        loaders: of the loads.

    Yields:
        A function to call when all loads have ended, while signals are deferred: the loads are
            final then.
    """
    every = list(loaders)
    begun = list(every)
    try:
        yield begun.clear
    except BaseException:
        with defer_signals():
            for loader in begun:
                loader.undo()
        raise
    finally:
        with defer_signals():
            for loader in every:
                loader.unlock()


__all__ = ["RowLoader", "undone_after_error"]
