"""Part of a table that receives the rows of a source: check everything first, then write."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from torch_dynemb.errors import ReplacedError
from torch_dynemb.migrate.source import Source, SourceRows, checked
from torch_dynemb.ops.columns import MAX_COUNT, Clock
from torch_dynemb.parts.table_parts import TablePart
from torch_dynemb.policy.admission import AdmitFrequent, AdmitFrequentSketch
from torch_dynemb.rows.into_part import IntoPart
from torch_dynemb.table import RowBatch, content
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.narrowing import check_batch_narrowed
from torch_dynemb.table.score_check import check_score
from torch_dynemb.table.state_check import check_counts


class Target:
    """Part of a table, and the source of its rows.

    Args:
        part: its table, ids and columns.
        source: of the table.
        optimizer_state, scores: whether they are loaded.

    Attributes:
        part: as given.
        fresh: content that starts with initial values.
        left_out: content of the source that the table does not keep.
        into: its ids, on the CPU, and the clock of their scores, after :meth:`read`.

    Raises:
        ValueError: the source does not fit the table.
    """

    def __init__(
        self, part: TablePart, source: Source, *, optimizer_state: bool, scores: bool
    ) -> None:
        self.part, self._source = part, source
        self._where = f"migrate.load: table {part.name!r}"
        if part.packed:
            raise ValueError(
                f"{self._where} has rows of 8 bits, which nothing is converted to: give it rows of "
                "floats"
            )
        dim = source.embedding_dim
        if dim is not None and dim != part.embedding_dim:
            raise ValueError(
                f"{self._where} has {part.embedding_dim} columns, but rows of {source.name} have "
                f"{dim}: give the table embedding_dim={dim}, or the source another value_dtype or "
                "embedding_dim, if its files do not say theirs"
            )
        fresh: list[str] = []
        left_out: list[str] = []
        self._state = self._state_of(optimizer_state, fresh, left_out)
        words = content.score_names(part.group.tables, part.table)
        self._scores = tuple(word for word in words if scores and word in source.scores)
        fresh += [f"score {word}" for word in words if word not in self._scores]
        left_out += [f"score {word}" for word in source.scores if word not in words]
        self.fresh, self.left_out = tuple(fresh), tuple(left_out)
        where = f"{self._where} gets from {source.name}"
        self.into = IntoPart(part.group.tables, part.table, where, part.ids)

    def _state_of(self, wanted: bool, fresh: list[str], left_out: list[str]) -> tuple[str, ...]:
        """Return the names of the optimizer state to load: all of it, or none."""
        part, source = self.part, self._source
        own = {tensor.name: tensor for tensor in part.optimizer.state} if part.optimizer else {}
        if part.trained == "never":
            left_out += [f"state {name}" for name in source.state]
            return ()
        if not wanted or not source.state:
            fresh += ["optimizer state"] if own else []
            left_out += [f"state {name}" for name in source.state]
            return ()
        name = "no optimizer yet" if part.optimizer is None else part.optimizer.name
        if own.keys() != set(source.state):
            raise ValueError(
                f"{self._where} has {name} with state {sorted(own)}, but {source.name} has "
                f"{sorted(source.state)}: give the table the optimizer with which it was written, "
                "or optimizer_state=False for rows alone"
            )
        packed = [tensor.name for tensor in own.values() if tensor.dtype == torch.uint8]
        if packed:
            raise ValueError(
                f"{self._where} has state {packed[0]!r} of 8 bits, which nothing is converted to: "
                "give optimizer_state=False, or state_dtype=torch.bfloat16"
            )
        if source.optimizer_steps is None:
            fresh.append("optimizer steps")
        return tuple(own)

    def check_empty(self, replace: bool) -> None:
        """Raise ValueError if the table has ids that may not be replaced."""
        size = self.part.group.size(self.part.table)
        if size > 0 and not replace:
            raise ValueError(
                f"{self._where} has {size} ids already: give replace=True to have them removed, or "
                "a new table"
            )

    # -- checking --------------------------------------------------------------------------------

    def read(self, size: int, *, finite: bool) -> None:
        """Read and check the source once, and keep the ids.

        Args:
            size: rows of a batch.
            finite: refuse NaN and infinity.

        Raises:
            TypeError, ValueError: the source is damaged, or does not fit the table.
        """
        step, newest = self._source.step or 0, 0
        for batch in self._source.batches(size):
            good = checked(self._source, batch, self.part.embedding_dim, finite=finite)
            self._check_state(good)
            check_batch_narrowed(
                self._where,
                good.batch,
                self.part.config.dtype,
                self.part.optimizer if self._state else None,
            )
            self._check_scores(good)
            for word, values in good.batch.scores.items():
                if word in self._scores and values.numel() > 0:
                    step = max(step, int(values.max())) if word == "step" else step
                    newest = max(newest, int(values.max())) if word == "timestamp" else newest
            self.into.take(RowBatch.without_rows(good.batch.ids.clone()))
        self.into.taken = [self.into.whole]
        self.into.check_distinct()
        self.into.check_room()
        now = self._source.now or newest
        if now == 0 and self.part.group.config.keeps_time:
            now = int(self.part.group.index.clock[Clock.NOW]) or int(time.time())
        self.into.step, self.into.now = step, max(now, newest)
        self._take_waiting()
        optimizer = self.part.optimizer
        if optimizer is not None and (self._state or not optimizer.state):
            self.into.optimizer_steps = self._source.optimizer_steps or 0

    def _check_state(self, given: SourceRows) -> None:
        optimizer = self.part.optimizer
        for tensor in optimizer.state if optimizer is not None else ():
            if tensor.name not in self._state:
                continue
            values = given.batch.state[tensor.name]
            columns = tensor.columns(self.part.embedding_dim)
            if values.shape[1] != columns:
                raise ValueError(
                    f"{given.where}: state {tensor.name!r} has {values.shape[1]} values of a row, "
                    f"but {type(optimizer).__name__} of {self._where} keeps {columns}: give "
                    "the table the optimizer with which it was written, or optimizer_state=False"
                )
            if tensor.dtype == torch.int32:
                check_counts(f"{given.where}: state {tensor.name!r}", values)

    def _check_scores(self, given: SourceRows) -> None:
        for word in self._scores:
            values = given.batch.scores[word]
            check_score(f"{given.where} has", word, values, self._source.step or 0)
            if values.numel() > 0 and word != "custom" and int(values.max()) > MAX_COUNT:
                raise ValueError(
                    f"{given.where} has {word} {int(values.max())} of an id, expected at most "
                    f"{MAX_COUNT}: repair it, or give scores=False"
                )

    def _take_waiting(self) -> None:
        counted, rule = self._source.waiting(), self.part.config.policy.admission
        exact = isinstance(rule, AdmitFrequent) and rule.half_life_ticks == 0
        if counted is None or not exact:
            if isinstance(rule, AdmitFrequent | AdmitFrequentSketch):
                self.fresh += ("counts of admission",)
            if counted is not None:
                self.left_out += ("counts of admission",)
            return
        ids, counts = counted.ids.cpu(), counted.counts.cpu()
        if ids.shape != counts.shape:
            raise ValueError(
                f"{self._source.name} has {ids.numel()} ids that wait for admission and "
                f"{counts.numel()} counts, expected a count for each id"
            )
        waiting = ~torch.isin(ids, self.into.whole.ids)  # ids with a row no longer wait
        self.into.take_counted([CountedIds(ids[waiting], counts[waiting])])

    # -- writing ---------------------------------------------------------------------------------

    def write(self, size: int) -> None:
        """Write the rows into unused slots.

        Args:
            size: rows of a batch.

        Raises:
            RuntimeError: the disk of the rows is full, or fails.
            ReplacedError: the source has changed since :meth:`read`.
        """
        device, begin, ids = self.part.group.device, 0, self.into.whole.ids
        for block in self._blocks(size):
            end = begin + block.ids.numel()
            if not torch.equal(block.ids, ids[begin:end]):
                break
            self.into.write(block.to(device).each(Tensor.contiguous), begin)
            begin = end
        if begin != ids.numel():
            raise ReplacedError(f"{self._source.name} has changed while it was read: load it again")

    def _blocks(self, size: int) -> Iterator[RowBatch]:
        """Iterate over the rows of the part's ids, with the part's columns."""
        columns = slice(self.part.columns.start, self.part.columns.stop)
        for read in self._source.batches(size):
            batch = checked(self._source, read, self.part.embedding_dim, finite=False).batch
            state = {
                name: values[:, columns] if values.shape[1] > 1 else values
                for name, values in batch.state.items()
                if name in self._state
            }
            some = batch._replace(
                rows=batch.rows[:, columns],
                state=state,
                scores={word: batch.scores[word] for word in self._scores},
            )
            # the batch of a single rank is not copied
            yield some if self.part.ids.whole else some.picked(self.part.ids.owned(batch.ids))


__all__ = ["Target"]
