"""Streams a saved table into unused rows of a part, whatever shards it was saved in.

Rows come first, while no id has them; ids are published last. So a file that turns out damaged on
the way has changed nothing that anybody sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.entries import (
    COUNT,
    ID,
    SKETCH,
    score_entry,
    state_entry,
)
from torch_dynemb.checkpoint.loading.row_reading import Chosen, RowReading, Target, places_of
from torch_dynemb.checkpoint.loading.score_check import check_score, check_waiting
from torch_dynemb.checkpoint.loading.table_plan import TablePlan
from torch_dynemb.checkpoint.manifest.records import SavedPart
from torch_dynemb.checkpoint.reading.saved_rows import COUNTED, SavedRows, TensorKind, kinds_of
from torch_dynemb.checkpoint.reading.sketches import combined_sketch
from torch_dynemb.checkpoint.saving.table_files import Progress
from torch_dynemb.errors import NoRoomError
from torch_dynemb.ops.columns import (
    GENERATION_BITS,
    SKETCH_ROWS,
    Hyper,
    Meta,
    PolicyColumn,
    Slab,
    Table,
)
from torch_dynemb.table.content import CountedIds, write_counts
from torch_dynemb.table.records import record_bytes
from torch_dynemb.table.row_access import first_generation, state_tensors, write_rows
from torch_dynemb.table.state_check import check_counts
from torch_dynemb.table.tables import Tables

_IDS_AT_ONCE = 1 << 20
_COUNTERS = slice(Table.INSERTED, Table.DEFAULT_SERVED + 1)


class Stream(NamedTuple):
    """Where files are, and how they are read.

    Attributes:
        folder: of the checkpoint.
        checked: whether their sums are compared.
        progress: is told of bytes that were read.
        verified: by file, blocks whose sums have been compared.
    """

    folder: Path
    checked: bool
    progress: Progress
    verified: dict[str, set[int]]


class PartLoad:
    """Loads a part of a table; it is empty.

    Args:
        plan: what is loaded.
        stream: where from.

    Attributes:
        evicted: ids that had no room, after :meth:`choose`.
        count: ids that are loaded, after :meth:`choose`.
    """

    def __init__(self, plan: TablePlan, stream: Stream) -> None:
        self._plan, self._stream = plan, stream
        self._part = plan.part
        self._reading = RowReading(plan, stream.progress)
        self._chosen: list[Chosen] = []
        self._scores: dict[str, Tensor] = {}
        self._counted: CountedIds | None = None
        self._sketch: Tensor | None = None
        self._begin = 0
        self.evicted = 0
        self.count = 0

    @property
    def _tables(self) -> Tables:
        return self._part.group.tables

    @property
    def _where(self) -> str:
        """Of whom errors tell."""
        return f"table {self._part.name!r}"

    @property
    def slab(self) -> int:
        """The slab of its rows."""
        return self._tables.config.slab_of(self._part.table)

    # -- ids -------------------------------------------------------------------------------------

    def choose(self) -> None:
        """Reads ids: those that are the part's own, and for which it has room.

        Raises:
            ValueError: the padding id is among them, or there is no room for all and no score to
                choose by.
            DamagedFileError: a file is damaged.
        """
        for source in self._plan.id_sources:
            with self._open(source) as rows:
                ids = rows.whole(ID)
                rows.finish()
            self._stream.progress(ids.numel() * 8)
            own = self._part.ids.owned(ids)
            padding = self._part.config.padding_idx
            if padding is not None and bool((ids == padding).any()):
                raise ValueError(
                    f"table {self._part.name!r} was saved with a row for id {padding}, which is "
                    "the padding id of the model's: give it the padding_idx it was saved with"
                )
            if bool(own.all()):
                self._chosen.append(Chosen(source, ids, None))
            else:
                places = own.nonzero()[:, 0]
                self._chosen.append(Chosen(source, ids[places], places))
        self.count = sum(chosen.ids.numel() for chosen in self._chosen)
        self._read_scores()
        bound = self._tables.config.capacity_bound(self._part.table)
        if bound is not None and self.count > bound:
            self._leave_out(bound)
        self._read_counts()

    def _open(self, part: SavedPart) -> SavedRows:
        kinds = kinds_of(self._plan.saved, part, self._plan.scores)
        folder, checked = self._stream.folder, self._stream.checked
        verified = self._stream.verified
        return SavedRows(folder, part.rows, checked=checked, kinds=kinds, verified=verified)

    def _read_scores(self) -> None:
        found: dict[str, list[Tensor]] = {word: [] for word in self._plan.scores}
        for chosen in self._chosen:
            if not found:
                break
            with self._open(chosen.source) as rows:
                for word, values in found.items():
                    whole = rows.whole(score_entry(word))
                    self._stream.progress(whole.numel() * 8)
                    values.append(whole if chosen.places is None else whole[chosen.places])
                rows.finish()
        none = torch.empty(0, dtype=torch.int64)
        self._scores = {word: torch.cat([none, *values]) for word, values in found.items()}
        for word, scores in self._scores.items():
            check_score(f"{self._where} was saved", word, scores, self._plan.saved.step)

    def _leave_out(self, bound: int) -> None:
        """Evicts what the policy would: the ids with the least scores."""
        deciding = self._part.config.policy.scores[0]
        if deciding not in self._scores or self._part.config.policy.full(
            budget=self._tables.config.memory_budget is not None
        ) in ("error", "default"):
            raise ValueError(
                f"table {self._part.name!r} was saved with {self.count} ids for this part, but has "
                f"room for {bound} and no score to choose by: give it a larger capacity"
            )
        ids = torch.cat([chosen.ids for chosen in self._chosen])
        order = torch.argsort(ids)  # of equal scores, the larger ids stay, as in an eviction
        order = order[torch.argsort(self._scores[deciding][order], stable=True)]
        kept = torch.zeros(self.count, dtype=torch.bool)
        kept[order[self.count - bound :]] = True
        self.evicted, begin = self.count - bound, 0
        for k, chosen in enumerate(self._chosen):
            end = begin + chosen.ids.numel()
            here = kept[begin:end].nonzero()[:, 0]
            places = here if chosen.places is None else chosen.places[here]
            self._chosen[k] = chosen._replace(ids=chosen.ids[here], places=places)
            begin = end
        self._scores = {word: values[kept] for word, values in self._scores.items()}
        self.count = bound

    def _read_counts(self) -> None:
        if not self._plan.counts:
            return
        if self._tables.config.layout.counters[self._part.table] is None:
            rows = self._tables.config.layout.rows[self._part.table]
            sources = self._plan.id_sources
            sketched = {of.sketch.path: of for of in sources if of.sketch is not None}
            self._sketch = combined_sketch(
                [self._sketch_of(part) for part in sketched.values()],
                rows[PolicyColumn.SKETCH_WIDTH],
            )
            return
        ids, counts = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for part in self._plan.id_sources:
            if part.counts is None:
                continue
            folder, checked = self._stream.folder, self._stream.checked
            with SavedRows(folder, [part.counts], checked=checked, kinds=COUNTED) as of:
                found, values = of.whole(ID), of.whole(COUNT)
                of.finish()
            own = self._part.ids.owned(found)
            ids.append(found[own])
            counts.append(values[own])
        self._counted = CountedIds(torch.cat(ids), torch.cat(counts))
        check_waiting(f"{self._where} was saved: it", *self._counted)

    def _sketch_of(self, part: SavedPart) -> Tensor:
        assert part.sketch is not None
        folder, checked = self._stream.folder, self._stream.checked
        kinds = {SKETCH: TensorKind((torch.int32,), (part.sketch_width,))}
        with SavedRows(folder, [part.sketch], checked=checked, kinds=kinds) as rows:
            cells = rows.whole(SKETCH)
            rows.finish()
        check_counts(SKETCH, cells)
        return cells

    def check(self) -> None:
        """Whether what :meth:`publish` finds wrong is right, before anything is replaced.

        Raises:
            ValueError: an id was saved twice, or a row has made less than no steps.
        """
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *(of.ids for of in self._chosen)])
        if ids.unique().numel() != ids.numel():
            raise ValueError(f"{self._where} was saved with an id twice")
        for tensor in self._plan.state:
            if tensor.dtype != torch.int32:
                continue
            for source in self._plan.sources:
                with self._open(source) as rows:
                    check_counts(state_entry(tensor.name), rows.whole(state_entry(tensor.name)))

    # -- rows ------------------------------------------------------------------------------------

    def stream(self, begin: int) -> None:
        """Reads rows and optimizer state into unused rows.

        Args:
            begin: the first of them.

        Raises:
            DamagedFileError: a file is damaged.
            RuntimeError: rows lie on a disk, which has no room for them, or fails.
        """
        self._begin = begin
        in_store = self._tables.stored(self.slab) is not None
        for chosen in self._chosen:
            sources = [
                source for source in self._plan.sources if source.id_slots == chosen.source.id_slots
            ]
            with ExitStack() as stack:
                opened = [(source, stack.enter_context(self._open(source))) for source in sources]
                if in_store:
                    self._stream_to_store(opened, chosen, begin)
                else:
                    self._reading.read(opened, chosen, self._in_memory(begin))
                for _, rows in opened:
                    rows.finish()
            begin += chosen.ids.numel()
        if not self._plan.state and not in_store:
            self._reset_state(begin)

    def _in_memory(self, begin: int) -> Target:
        tables = self._tables
        state = state_tensors(tables, self.slab)
        return Target(tables.rows.weights[self.slab], state, begin, None)

    def _stream_to_store(
        self, opened: Sequence[tuple[SavedPart, SavedRows]], chosen: Chosen, begin: int
    ) -> None:
        """Piece by piece with all columns and state, under the handles that the ids will get."""
        tables, slab = self._tables, self.slab
        names = [tensor.name for tensor in self._plan.state]
        generation = first_generation(tables, slab)
        for low, high in opened[0][1].ranges(record_bytes(tables.config, slab)):
            at, count = places_of(chosen, low, high)
            state = state_tensors(tables, slab)
            target = Target(
                tables.rows.weights[slab].new_empty(count, len(self._part.columns)),
                {name: state[name].new_empty(count, *state[name].shape[1:]) for name in names},
                -at,
                range(low, high),
            )
            self._reading.read(opened, chosen, target)
            ids = chosen.ids[at : at + count].to(tables.device)
            rows = torch.arange(begin + at, begin + at + count, device=tables.device)
            handles = (rows << GENERATION_BITS) | generation
            write_rows(tables, self._part.table, ids, handles, target.weights, target.state)

    def _reset_state(self, end: int) -> None:
        """Optimizer state of the rows as that of new ones."""
        for k, tensor in enumerate(state_tensors(self._tables, self.slab).values()):
            initial = self._tables.rows.hyper[self._part.table, Hyper.INITIAL_STATE]
            tensor[self._begin : end] = initial.to(tensor.dtype) if k == 0 else 0

    # -- publishing ------------------------------------------------------------------------------

    def publish(self) -> None:
        """Gives the rows to their ids; no row of the slab is free, and the table is empty."""
        tables, table = self._tables, self._part.table
        index, slab = tables.index, self.slab
        index.meta[table, Meta.SEED] = self._plan.saved.seed
        before = index.tables[table, _COUNTERS].clone()
        ops.grow_(index, table, self.count)
        if self._counted is not None and self._counted.ids.numel() > 0:
            ids, counts = (values.to(tables.device) for values in self._counted)
            write_counts(tables, table, CountedIds(ids, counts))
        begin, done = self._begin, 0
        assert int(index.slabs[slab, Slab.NEXT_ROW]) <= begin
        index.slabs[slab, Slab.NEXT_ROW] = begin
        tables.bind_memory()
        rule = tables.config.layout.assign_rows[table : table + 1]
        for chosen in self._chosen:
            for ids in chosen.ids.split(_IDS_AT_ONCE):
                self._publish(ids.to(tables.device), begin + done, done, rule)
                done += ids.numel()
        if int(index.tables[table, Table.SIZE]) != self.count:
            raise ValueError(f"{self._where} was saved with an id twice")
        index.tables[table, _COUNTERS] = before
        self._count_up()
        if self._sketch is not None:
            first = tables.config.layout.rows[table][PolicyColumn.SKETCH_BEGIN]
            cells = self._sketch.to(tables.device).reshape(-1)
            index.sketch[first : first + SKETCH_ROWS * self._sketch.shape[1]] = cells

    def _publish(self, ids: Tensor, begin: int, done: int, rule: list[int]) -> None:
        tables, table = self._tables, self._part.table
        count = ids.numel()
        if count == 0:
            return
        offsets = torch.tensor([0, count], device=tables.device)
        handles = ops.find_or_insert_(tables.index, ids, offsets, None, [table], rule)
        if bool((handles < 0).any()):
            raise NoRoomError(
                f"table {self._part.name!r} has no room for {self.count} ids: give it a larger "
                "capacity or memory budget",
                tables=[self._part.name],
            )
        rows = torch.arange(begin, begin + count, device=tables.device)
        generations = handles & ((1 << GENERATION_BITS) - 1)
        expected = (rows << GENERATION_BITS) | generations
        if not torch.equal(handles, expected):
            if torch.unique(ids).numel() != count:
                raise ValueError(f"table {self._part.name!r} was saved with an id twice")
            ops.set_handles_(tables.index, ids, offsets, [table], expected)
        if tables.stored(self.slab) is None:
            tables.rows.generations[self.slab][begin : begin + count] = generations.to(torch.int32)
        else:
            # rows of a store have been written for these handles
            assert bool((generations == first_generation(tables, self.slab)).all())
        for word, values in self._scores.items():
            ops.set_scores_(
                tables.index,
                ids,
                offsets,
                [table],
                values[done : done + count].to(tables.device),
                word=tables.config.layout.score_words.index(word),
            )

    def _count_up(self) -> None:
        """What has happened to the table, if it is the part that goes on counting."""
        parts = self._plan.saved.parts
        own = next(
            (
                part.counters
                for part in parts
                if part.id_slots == self._part.ids
                and range(part.first_column, part.first_column + part.columns) == self._part.columns
            ),
            None,
        )
        if own is None and self._part.ids.begin == 0:
            first = [part.counters for part in self._plan.saved.first_parts]
            own = [sum(values) for values in zip(*first, strict=True)]
        counters = [0] * 16 if own is None else own
        self._tables.index.tables[self._part.table, _COUNTERS] = torch.tensor(
            counters[_COUNTERS], device=self._tables.device
        )


__all__ = ["PartLoad", "Stream"]
