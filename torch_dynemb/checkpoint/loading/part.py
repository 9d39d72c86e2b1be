"""Streaming of a saved table into unused rows of a part, from any saved sharding.

Rows are written first, while no id refers to them, and ids are published last. So a file that turns
out to be damaged on the way has changed nothing visible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_dynemb.checkpoint.loading.later import LaterTable
from torch_dynemb.checkpoint.loading.row_reading import Chosen, ReadTarget, RowReading, places_of
from torch_dynemb.checkpoint.loading.table_plan import TablePlan
from torch_dynemb.checkpoint.reading.saved_rows import (
    COUNTED,
    PIECE_BYTES,
    SavedRows,
    TensorKind,
    kinds_of,
)
from torch_dynemb.checkpoint.saving.table_files import Progress
from torch_dynemb.files.locations import Location
from torch_dynemb.ops.columns import (
    SKETCH_ROWS,
    Clock,
    Hyper,
    Meta,
    PolicyColumn,
    Table,
)
from torch_dynemb.parts.merged_ids import outside
from torch_dynemb.parts.saved_tables import SavedFile, SavedPart
from torch_dynemb.parts.sketches import combined_sketch
from torch_dynemb.policy.half_life import waiting_with_half_life, with_half_life
from torch_dynemb.rows.loader import RowLoader
from torch_dynemb.rows.tensor_names import COUNT, ID, SKETCH, score_entry, state_entry
from torch_dynemb.table.capacity_choice import ids_with_room
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.records import record_bytes
from torch_dynemb.table.row_access import state_tensors
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.score_check import check_score, check_waiting
from torch_dynemb.table.state_check import check_counts
from torch_dynemb.table.tables import Tables

_COUNTERS = slice(Table.INSERTED, Table.DEFAULT_SERVED + 1)


@dataclass(eq=False)
class Stream:
    """Access to the files of a checkpoint.

    Attributes:
        folder: folder of the checkpoint.
        progress: called with the number of bytes read.
        checked: whether checksums are compared.
        verified: by file, blocks with checksums already compared.
    """

    folder: Location
    progress: Progress
    checked: bool = True
    verified: dict[str, set[int]] = field(default_factory=dict)

    def open(self, files: Sequence[SavedFile], kinds: Mapping[str, TensorKind]) -> SavedRows:
        """Open files of rows.

        Args:
            files: files of one part.
            kinds: required tensors.
        """
        checked, verified = self.checked, self.verified
        return SavedRows(self.folder, files, checked=checked, kinds=kinds, verified=verified)


class PartLoad:
    """Loader of a part of a table, which is empty.

    Args:
        plan: what is loaded.
        stream: access to the files.

    Attributes:
        evicted: number of ids without room, after :meth:`choose`.
        count: number of loaded ids, after :meth:`choose`.
    """

    def __init__(self, plan: TablePlan, stream: Stream) -> None:
        self._plan, self._stream = plan, stream
        self._part = plan.part
        self._reading = RowReading(plan, stream.progress)
        self._chosen: list[Chosen] = []
        self._scores: dict[str, Tensor] = {}
        self._counted: CountedIds | None = None
        self._sketch: Tensor | None = None
        self.evicted = 0
        self.count = 0

    @property
    def _tables(self) -> Tables:
        return self._part.group.tables

    @property
    def _where(self) -> str:
        """Prefix of errors."""
        return f"table {self._part.name!r}"

    @property
    def _now(self) -> int:
        """Time of the saved table, or of the part's if the saved table kept none."""
        return self._plan.saved.now or int(self._tables.index.clock[Clock.NOW])

    @property
    def _slab(self) -> int:
        """Slab of its rows."""
        return self._tables.config.slab_of(self._part.table)

    # -- ids -------------------------------------------------------------------------------------

    def choose(self) -> None:
        """Read ids, and choose those that the part owns and has room for.

        Raises:
            ValueError: the padding id is among them, or there is too little room and no score to
                choose by.
            DamagedFileError: a file is damaged.
        """
        for source in self._plan.id_sources:
            with self._open(source) as rows:
                ids = rows.whole(ID)
                rows.finish()
            self._stream.progress(ids.numel() * 8)
            self._choose(source, ids)
        if self._plan.later is not None:
            self._choose(None, self._plan.later.changed.ids)
            for of in self._plan.state:
                if of.dtype == torch.int32:
                    check_counts(of.name, self._plan.later.changed.state[of.name])
        self.count = sum(chosen.ids.numel() for chosen in self._chosen)
        self._read_scores()
        self._leave_out()
        self._read_counts()

    def _choose(self, source: SavedPart | None, ids: Tensor) -> None:
        """Choose the ids of a source that the part owns, and that no later change replaces."""
        own, later = self._part.ids.owned(ids), self._plan.later
        padding = self._part.config.padding_idx
        if padding is not None and bool((ids == padding).any()):
            raise ValueError(
                f"table {self._part.name!r} was saved with a row for id {padding}, which is "
                "the padding id of the model's: give it the padding_idx it was saved with"
            )
        if source is not None and later is not None:
            own &= outside(ids, later.touched)
        if bool(own.all()):
            self._chosen.append(Chosen(source, ids, None))
        else:
            places = own.nonzero()[:, 0]
            self._chosen.append(Chosen(source, ids[places], places))

    def _open(self, part: SavedPart) -> SavedRows:
        return self._stream.open(part.rows, kinds_of(self._plan.saved, part, self._plan.scores))

    def _read_scores(self) -> None:
        found: dict[str, list[Tensor]] = {word: [] for word in self._plan.scores}
        for chosen in self._chosen:
            if not found:
                break
            if chosen.source is None:
                assert self._plan.later is not None
                for word, values in found.items():
                    whole = self._plan.later.changed.scores[word]
                    values.append(whole if chosen.places is None else whole[chosen.places])
                continue
            with self._open(chosen.source) as rows:
                for word, values in found.items():
                    whole = rows.whole(score_entry(word))
                    self._stream.progress(whole.numel() * 8)
                    values.append(whole if chosen.places is None else whole[chosen.places])
                rows.finish()
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        self._scores = {word: torch.cat([none, *values]) for word, values in found.items()}
        for word, scores in self._scores.items():
            check_score(f"{self._where} was saved", word, scores, self._plan.saved.step)
        if "decayed" in self._scores:
            saved = self._plan.saved
            self._scores["decayed"] = with_half_life(
                self._scores["decayed"],
                int(saved.policy.get("half_life", 0)),
                self._part.config.policy.half_life_ticks,
                step=saved.step,
                now=self._now,
            )

    def _leave_out(self) -> None:
        """Leave out the ids that the part has no room for."""
        bound = self._tables.config.capacity_bound(self._part.table)
        if bound is None or self.count <= bound:
            return
        ids = torch.cat([chosen.ids for chosen in self._chosen])
        kept = ids_with_room(
            self._tables, self._part.table, ids, self._scores, f"{self._where} was saved with"
        )
        if kept is None:
            return
        begin = 0
        for k, chosen in enumerate(self._chosen):
            end = begin + chosen.ids.numel()
            here = kept[begin:end].nonzero()[:, 0]
            places = here if chosen.places is None else chosen.places[here]
            self._chosen[k] = chosen._replace(ids=chosen.ids[here], places=places)
            begin = end
        self._scores = {word: values[kept] for word, values in self._scores.items()}
        self.evicted = self.count - int(kept.sum())
        self.count -= self.evicted

    def _read_counts(self) -> None:
        if not self._plan.counts:
            return
        if self._plan.later is not None:
            self._take_later_counts(self._plan.later)
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
        ids, counts = (
            [torch.empty(0, dtype=torch.int64, device="cpu")],
            [torch.empty(0, dtype=torch.int64, device="cpu")],
        )
        for part in self._plan.id_sources:
            if part.counts is None:
                continue
            with self._stream.open([part.counts], COUNTED) as of:
                found, values = of.whole(ID), of.whole(COUNT)
                of.finish()
            own = self._part.ids.owned(found)
            ids.append(found[own])
            counts.append(values[own])
        counted = CountedIds(torch.cat(ids), torch.cat(counts))
        check_waiting(f"{self._where} was saved: it", *counted)
        saved = self._plan.saved
        now = waiting_with_half_life(
            counted.counts,
            int(saved.policy.get("admission_half_life", 0)),
            self._part.config.policy.admission_ticks,
            step=saved.step,
            now=self._now,
        )
        self._counted = CountedIds(counted.ids[now > 0], now[now > 0])

    def _take_later_counts(self, later: LaterTable) -> None:
        if later.counted is not None:
            own = self._part.ids.owned(later.counted.ids)
            self._counted = CountedIds(later.counted.ids[own], later.counted.counts[own])
            check_waiting(f"{self._where} was published: it", *self._counted)
            return
        rows = self._tables.config.layout.rows[self._part.table]
        shared = [cells for ids, cells in later.sketches.items() if ids.shares(self._part.ids)]
        for cells in shared:
            check_counts(SKETCH, cells)
        self._sketch = combined_sketch(shared, rows[PolicyColumn.SKETCH_WIDTH])

    def _sketch_of(self, part: SavedPart) -> Tensor:
        assert part.sketch is not None
        kinds = {SKETCH: TensorKind((torch.int32,), (part.sketch_width,))}
        with self._stream.open([part.sketch], kinds) as rows:
            cells = rows.whole(SKETCH)
            rows.finish()
        check_counts(SKETCH, cells)
        return cells

    def check(self) -> None:
        """Check, before anything is replaced, what :meth:`publish` would find wrong.

        Raises:
            ValueError: an id was saved twice, or a row has a negative number of steps.
        """
        ids = torch.cat(
            [torch.empty(0, dtype=torch.int64, device="cpu"), *(of.ids for of in self._chosen)]
        )
        if ids.unique().numel() != ids.numel():
            raise ValueError(f"{self._where} was saved with an id twice")
        for tensor in self._plan.state:
            if tensor.dtype != torch.int32:
                continue
            for source in self._plan.sources:
                with self._open(source) as rows:
                    check_counts(state_entry(tensor.name), rows.whole(state_entry(tensor.name)))

    # -- rows ------------------------------------------------------------------------------------

    def stream(self, loader: RowLoader) -> None:
        """Read rows and optimizer state into unused rows.

        Args:
            loader: row loader of the table.

        Raises:
            DamagedFileError: a file is damaged.
            RuntimeError: rows lie on a disk, which is full or fails.
        """
        tables, done = self._tables, 0
        begin = loader.begin_of(self._part.table)
        in_store = tables.stored(self._slab) is not None
        for chosen in self._chosen:
            if chosen.source is None:
                self._write_later(loader, chosen, done)
                done += chosen.ids.numel()
                continue
            sources = [
                source for source in self._plan.sources if source.id_slots == chosen.source.id_slots
            ]
            with ExitStack() as stack:
                opened = [(source, stack.enter_context(self._open(source))) for source in sources]
                if in_store:
                    self._stream_to_store(loader, opened, chosen, done)
                else:
                    state = state_tensors(tables, self._slab)
                    weights = tables.rows.weights[self._slab]
                    self._reading.read(
                        opened, chosen, ReadTarget(weights, state, begin + done, None)
                    )
                for _, rows in opened:
                    rows.finish()
            done += chosen.ids.numel()
        if not self._plan.state and not in_store:
            self._reset_state(begin)

    def _stream_to_store(
        self,
        loader: RowLoader,
        opened: Sequence[tuple[SavedPart, SavedRows]],
        chosen: Chosen,
        done: int,
    ) -> None:
        """Write rows to a store, piece by piece with all columns and state."""
        tables, slab = self._tables, self._slab
        names = [tensor.name for tensor in self._plan.state]
        for low, high in opened[0][1].ranges(record_bytes(tables.config, slab)):
            at, count = places_of(chosen, low, high)
            state = state_tensors(tables, slab)
            target = ReadTarget(
                tables.rows.weights[slab].new_empty(count, len(self._part.columns)),
                {name: state[name].new_empty(count, *state[name].shape[1:]) for name in names},
                -at,
                range(low, high),
            )
            self._reading.read(opened, chosen, target)
            ids = chosen.ids[at : at + count].to(tables.device)
            batch = RowBatch(ids, target.weights, target.state)
            loader.write(self._part.table, batch, done + at)

    def _write_later(self, loader: RowLoader, chosen: Chosen, done: int) -> None:
        """Write changed rows, some MiB at a time."""
        tables, part, later = self._tables, self._part, self._plan.later
        assert later is not None
        tensors = state_tensors(tables, self._slab)
        step = max(1, PIECE_BYTES // record_bytes(tables.config, self._slab))
        for begin in range(0, chosen.ids.numel(), step):
            some = slice(begin, min(begin + step, chosen.ids.numel()))
            places = some if chosen.places is None else chosen.places[some]
            state = {of.name: later.state_of(of, part.columns, places) for of in self._plan.state}
            state = {name: of.to(tables.device, tensors[name].dtype) for name, of in state.items()}
            rows = later.changed.rows[places][:, part.columns.start : part.columns.stop]
            rows = rows.to(tables.device, tables.rows.weights[self._slab].dtype)
            batch = RowBatch(chosen.ids[some].to(tables.device), rows, state)
            loader.write(part.table, batch, done + begin)

    def _reset_state(self, begin: int) -> None:
        """Set the optimizer state of the rows to that of new rows."""
        initial = self._tables.rows.hyper[self._part.table, Hyper.INITIAL_STATE]
        for k, tensor in enumerate(state_tensors(self._tables, self._slab).values()):
            tensor[begin : begin + self.count] = initial.to(tensor.dtype) if k == 0 else 0

    # -- publishing ------------------------------------------------------------------------------

    def publish(self, loader: RowLoader) -> None:
        """Publish the ids with their rows. The table is empty before.

        Args:
            loader: row loader of the table.
        """
        tables, table = self._tables, self._part.table
        tables.index.meta[table, Meta.SEED] = self._plan.saved.seed
        ids = [chosen.ids for chosen in self._chosen]
        loader.publish(table, ids, self._counted, self._scores)
        self._count_up()
        if self._sketch is not None:
            first = tables.config.layout.rows[table][PolicyColumn.SKETCH_BEGIN]
            cells = self._sketch.to(tables.device).reshape(-1)
            tables.index.sketch[first : first + SKETCH_ROWS * self._sketch.shape[1]] = cells

    def _count_up(self) -> None:
        """Set the event counters, if this part continues those that were saved."""
        later = self._plan.later
        saved = self._plan.saved if later is None else later.saved
        parts = saved.parts
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
            first = [part.counters for part in saved.first_parts]
            own = [sum(values) for values in zip(*first, strict=True)]
        counters = [0] * 16 if own is None else own
        self._tables.index.tables[self._part.table, _COUNTERS] = torch.tensor(
            counters[_COUNTERS], device=self._tables.device
        )


__all__ = ["PartLoad", "Stream"]
