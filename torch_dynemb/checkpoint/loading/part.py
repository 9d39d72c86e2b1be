"""Streaming of a saved table into unused rows of a part, from any saved sharding.

Rows are written first, while no id refers to them, and ids are published last. So a file that turns
out to be damaged on the way has changed nothing visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    Clock,
    Hyper,
)
from torch_dynemb.parts.saved_tables import SavedFile, SavedPart
from torch_dynemb.policy.half_life import waiting_with_half_life, with_half_life
from torch_dynemb.rows.into_part import IntoPart
from torch_dynemb.rows.tensor_names import COUNT, ID, SKETCH, score_entry, state_entry
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.records import record_bytes
from torch_dynemb.table.row_access import state_tensors
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.score_check import check_score
from torch_dynemb.table.state_check import check_counts


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
        into: the ids that it takes, after :meth:`choose`.
        evicted: number of ids without room, after :meth:`choose`.
    """

    def __init__(self, plan: TablePlan, stream: Stream) -> None:
        self._plan, self._stream = plan, stream
        self._part = plan.part
        self._reading = RowReading(plan, stream.progress)
        self._chosen: list[Chosen] = []
        self._tables = self._part.group.tables
        where = f"table {self._part.name!r} was saved with"
        self.into = IntoPart(self._tables, self._part.table, where, self._part.ids)
        self.into.seed, self.into.optimizer_steps = plan.saved.seed, plan.optimizer_steps
        self.into.step, self.into.now = plan.saved.step, plan.saved.now
        self.evicted = 0

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
        later = self._plan.later
        for source in self._plan.id_sources:
            with self._open(source) as rows:
                ids = rows.whole(ID)
                scores = {word: rows.whole(score_entry(word)) for word in self._plan.scores}
                rows.finish()
            self._stream.progress(ids.numel() * 8 * (1 + len(scores)))
            self._take(source, RowBatch.without_rows(ids, scores))
        if later is not None:
            changed, words = later.changed, self._plan.scores
            scores = {word: changed.scores[word] for word in words}
            self._take(None, RowBatch.without_rows(changed.ids, scores))
            for of in self._plan.state:
                if of.dtype == torch.int32:
                    check_counts(of.name, changed.state[of.name])
        count, stay = self.into.count, self.into.make_room()
        if stay is not None:
            self.evicted = count - self.into.count
            self._chosen = [
                of._replace(places=places if of.places is None else of.places[places])
                for of, places in zip(self._chosen, stay, strict=True)
            ]
        self._read_counts()
        saved = self._plan.saved if later is None else later.saved
        old = [(of.id_slots, of.range_of_columns, of.counters) for of in saved.parts]
        self.into.continue_counters(self._part.ids, self._part.columns, old)

    def _take(self, source: SavedPart | None, batch: RowBatch) -> None:
        """Take the ids of a source that the part owns, and that no later change replaces."""
        later, saved, scores = self._plan.later, self._plan.saved, dict(batch.scores)
        for word, values in scores.items():
            check_score(self.into.where, word, values, saved.step)
        if "decayed" in scores:
            scores["decayed"] = with_half_life(
                scores["decayed"],
                int(saved.policy.get("half_life", 0)),
                self._part.config.policy.half_life_ticks,
                step=saved.step,
                now=self._now,
            )
        skipped = None if source is None or later is None else later.touched
        places = self.into.take(batch._replace(scores=scores), skipped)
        self._chosen.append(Chosen(source, places))

    def _open(self, part: SavedPart) -> SavedRows:
        return self._stream.open(part.rows, kinds_of(self._plan.saved, part, self._plan.scores))

    def _read_counts(self) -> None:
        if not self._plan.counts:
            return
        if self._tables.config.layout.counters[self._part.table] is None:
            self.into.take_sketches(self._sketches())
            return
        self.into.take_counted(self._counted())
        counted, saved = self.into.counted, self._plan.saved
        assert counted is not None
        now = waiting_with_half_life(
            counted.counts,
            int(saved.policy.get("admission_half_life", 0)),
            self._part.config.policy.admission_ticks,
            step=saved.step,
            now=self._now,
        )
        self.into.counted = CountedIds(counted.ids[now > 0], now[now > 0])

    def _counted(self) -> Iterator[CountedIds]:
        later = self._plan.later
        if later is not None and later.counted is not None:
            yield later.counted
        for part in self._plan.id_sources if later is None else ():
            if part.counts is not None:
                with self._stream.open([part.counts], COUNTED) as of:
                    yield CountedIds(of.whole(ID), of.whole(COUNT))
                    of.finish()

    def _sketches(self) -> list[Tensor]:
        later = self._plan.later
        if later is not None:
            return [cells for ids, cells in later.sketches.items() if ids.shares(self._part.ids)]
        found: dict[str, Tensor] = {}
        for part in self._plan.id_sources:
            if part.sketch is not None and part.sketch.path not in found:
                kinds = {SKETCH: TensorKind((torch.int32,), (part.sketch_width,))}
                with self._stream.open([part.sketch], kinds) as rows:
                    found[part.sketch.path] = rows.whole(SKETCH)
                    rows.finish()
        return list(found.values())

    def check(self) -> None:
        """Check, before anything is replaced, what publishing would find wrong.

        Raises:
            ValueError: an id was saved twice, or a row has a negative number of steps.
        """
        self.into.check_distinct()
        for tensor in self._plan.state:
            if tensor.dtype != torch.int32:
                continue
            for source in self._plan.sources:
                with self._open(source) as rows:
                    check_counts(state_entry(tensor.name), rows.whole(state_entry(tensor.name)))

    # -- rows ------------------------------------------------------------------------------------

    def stream(self) -> None:
        """Read rows and optimizer state into unused rows.

        Raises:
            DamagedFileError: a file is damaged.
            RuntimeError: rows lie on a disk, which is full or fails.
        """
        tables, done = self._tables, 0
        begin = self.into.loader.begin_of(self._part.table)
        in_store = tables.stored(self._slab) is not None
        for chosen, taken in zip(self._chosen, self.into.taken, strict=True):
            ids = taken.ids
            if chosen.source is None:
                self._write_later(chosen, ids, done)
                done += ids.numel()
                continue
            sources = [
                source for source in self._plan.sources if source.id_slots == chosen.source.id_slots
            ]
            with ExitStack() as stack:
                opened = [(source, stack.enter_context(self._open(source))) for source in sources]
                if in_store:
                    self._stream_to_store(opened, chosen, ids, done)
                else:
                    state = state_tensors(tables, self._slab)
                    weights = tables.rows.weights[self._slab]
                    self._reading.read(
                        opened, chosen, ReadTarget(weights, state, begin + done, None, ids)
                    )
                for _, rows in opened:
                    rows.finish()
            done += ids.numel()
        if not self._plan.state and not in_store:
            self._reset_state(begin)

    def _stream_to_store(
        self, opened: Sequence[tuple[SavedPart, SavedRows]], chosen: Chosen, ids: Tensor, done: int
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
                ids,
            )
            self._reading.read(opened, chosen, target)
            some = ids[at : at + count].to(tables.device)
            self.into.write(RowBatch(some, target.weights, target.state), done + at)

    def _write_later(self, chosen: Chosen, ids: Tensor, done: int) -> None:
        """Write changed rows, some MiB at a time."""
        tables, part, later = self._tables, self._part, self._plan.later
        assert later is not None
        tensors = state_tensors(tables, self._slab)
        step = max(1, PIECE_BYTES // record_bytes(tables.config, self._slab))
        for begin in range(0, ids.numel(), step):
            some = slice(begin, min(begin + step, ids.numel()))
            places = some if chosen.places is None else chosen.places[some]
            state = {of.name: later.state_of(of, part.columns, places) for of in self._plan.state}
            state = {name: of.to(tables.device, tensors[name].dtype) for name, of in state.items()}
            rows = later.changed.rows[places][:, part.columns.start : part.columns.stop]
            rows = rows.to(tables.device, tables.rows.weights[self._slab].dtype)
            self.into.write(RowBatch(ids[some].to(tables.device), rows, state), done + begin)

    def _reset_state(self, begin: int) -> None:
        """Set the optimizer state of the rows to that of new rows."""
        initial = self._tables.rows.hyper[self._part.table, Hyper.INITIAL_STATE]
        for k, tensor in enumerate(state_tensors(self._tables, self._slab).values()):
            tensor[begin : begin + self.into.count] = initial.to(tensor.dtype) if k == 0 else 0


__all__ = ["PartLoad", "Stream"]
