"""New content of parts of tables: their ids, and what is set together with them.

Checkpoints, state dicts, moves between plans and files of other libraries are sources of rows. Each
one takes these steps:

1. :meth:`IntoPart.take`: choose the ids that the part owns. Rows follow in the order of these ids.
2. :meth:`IntoPart.make_room`, or :meth:`IntoPart.check_room`: compare them with the capacity.
3. :func:`loaders_of` gives the parts of each group a loader.
4. :func:`replace_content` begins the loads, has the rows written, and publishes the ids on all
   ranks, or on none. :func:`write_arriving` writes rows that other ranks send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_dynemb.distributed.together import Ranks
from torch_dynemb.ops.columns import Clock, Meta, PolicyColumn, Table
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.rows.exchange import ArrivedBlock, Place, RowExchange, Sent, use_each
from torch_dynemb.rows.loader import RowLoader, undone_after_error
from torch_dynemb.rows.sketches import combined_sketch
from torch_dynemb.table.clock import set_time
from torch_dynemb.table.content import CountedIds, set_optimizer_steps, sketch_of
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.score_check import check_waiting
from torch_dynemb.table.shards import IdSlots
from torch_dynemb.table.state_check import check_counts
from torch_dynemb.table.tables import Tables

_COUNTERS = slice(Table.INSERTED, Table.DEFAULT_SERVED + 1)


@dataclass(eq=False)
class IntoPart:
    """Part of a table that gets new content.

    Attributes:
        tables: of the group.
        table: its number.
        where: beginning of errors, such as ``"table 'ads' was saved with"``.
        owned: ids of the part.
        taken: ids with their scores, in the order of their rows. Without scores, batches of rows
            have them.
        counted: ids that wait for admission; None: there are none.
        sketch: admission sketch, int32 [rows, width]; None: it stays.
        seed: of initial rows; None: it stays.
        counters: event counters, int64 [16]; None: they stay.
        optimizer_steps: updates of its optimizer.
        step, now: clock of the rows: training steps, and seconds; 0: unknown.
        loader: of its rows, after :func:`loaders_of`.
        ascending: int64 [n], the ids, after :meth:`sort`.
        numbers: int64 [n], of their rows.
    """

    tables: Tables
    table: int
    where: str
    owned: IdSlots = field(default_factory=IdSlots)
    taken: list[RowBatch] = field(default_factory=list)
    counted: CountedIds | None = None
    sketch: Tensor | None = None
    seed: int | None = None
    counters: Sequence[int] | None = None
    optimizer_steps: int = 0
    step: int = 0
    now: int = 0
    loader: RowLoader = field(init=False)
    ascending: Tensor = field(init=False)
    numbers: Tensor = field(init=False)

    @property
    def count(self) -> int:
        """Number of taken ids."""
        return sum(of.ids.numel() for of in self.taken)

    @property
    def whole(self) -> RowBatch:
        """All taken ids with their scores."""
        none = RowBatch.without_rows(torch.empty(0, dtype=torch.int64, device="cpu"))
        return RowBatch.joined(self.taken or [none])

    # -- choosing --------------------------------------------------------------------------------

    def take(self, batch: RowBatch, skipped: Tensor | None = None) -> Tensor | None:
        """Take the ids that the part owns, as the next ones.

        Args:
            batch: ids and scores, of the CPU unless the part owns all ids.
            skipped: int64 [m], ascending: ids that are not taken; None: there are none.

        Returns:
            int64 [m], their places in the batch; None: all were taken.

        Raises:
            ValueError: the batch has the padding id.
        """
        padding = self.tables.config.tables[self.table].padding_idx
        if padding is not None and bool((batch.ids == padding).any()):
            raise ValueError(
                f"{self.where} a row for id {padding}, which is the padding id of the model's: "
                "give it the padding_idx it was saved with"
            )
        own = self.owned.owned(batch.ids)
        if skipped is not None:
            own &= outside(batch.ids, skipped)
        places = None if bool(own.all()) else own.nonzero()[:, 0]
        self.taken.append(batch if places is None else batch.picked(places))
        return places

    def check_distinct(self) -> None:
        """Raise ValueError if an id was taken twice."""
        ordered = self.whole.ids.sort().values
        twice = (ordered[1:] == ordered[:-1]).nonzero()
        if twice.numel() > 0:
            raise ValueError(
                f"{self.where} an id twice: {int(ordered[twice[0, 0]])}, and {twice.numel()} ids "
                "too many: keep one row of each id"
            )

    def check_room(self, lacking: str = "") -> None:
        """Raise ValueError if the part has too little room.

        Args:
            lacking: what else the error says.
        """
        bound = self.tables.config.capacity_bound(self.table)
        if bound is not None and self.count > bound:
            raise ValueError(
                f"{self.where} {self.count} ids for this part, but has room for {bound}{lacking}: "
                "give it a larger capacity"
            )

    def make_room(self) -> list[Tensor] | None:
        """Leave out the ids with the lowest scores, as the policy of the table would evict them.

        Among equal scores, larger ids stay, as in an eviction.

        Returns:
            For each taken batch the places of ids that stay, int64 [m]; None: all stay.

        Raises:
            ValueError: there is too little room, and no score to choose by.
        """
        config, count = self.tables.config, self.count
        bound = config.capacity_bound(self.table)
        if bound is None or count <= bound:
            return None
        policy, whole = config.tables[self.table].policy, self.whole
        refuses = policy.full(budget=config.memory_budget is not None) in ("error", "default")
        if policy.scores[0] not in whole.scores or refuses:
            self.check_room(" and no score to choose by")  # raises
        order = torch.argsort(whole.ids)
        order = order[torch.argsort(whole.scores[policy.scores[0]][order], stable=True)]
        kept = torch.zeros(count, dtype=torch.bool, device=order.device)
        kept[order[count - bound :]] = True
        sizes = [of.ids.numel() for of in self.taken]
        places = [of.nonzero()[:, 0] for of in kept.split(sizes)]
        self.taken = [batch.picked(of) for batch, of in zip(self.taken, places, strict=True)]
        return places

    def take_counted(self, counted: Iterable[CountedIds]) -> None:
        """Take the ids that the part owns among those that wait for admission.

        Args:
            counted: ids without a row, of the CPU.

        Raises:
            ValueError: an id is there twice, or a count is impossible.
        """
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        ids, counts = [none], [none]
        for some in counted:
            own = self.owned.owned(some.ids)
            ids.append(some.ids[own])
            counts.append(some.counts[own])
        self.counted = CountedIds(torch.cat(ids), torch.cat(counts))
        check_waiting(self.where, *self.counted)

    def take_sketches(self, sketches: Sequence[Tensor]) -> None:
        """Combine the admission sketches of all parts that ids come from.

        Args:
            sketches: int32 [rows, width of each].

        Raises:
            ValueError: a count is negative.
        """
        for cells in sketches:
            check_counts("sketch", cells)
        if sketches:
            width = self.tables.config.layout.rows[self.table][PolicyColumn.SKETCH_WIDTH]
            self.sketch = combined_sketch([cells.cpu() for cells in sketches], width)

    def continue_counters(
        self, ids: IdSlots, columns: range, old: Sequence[tuple[IdSlots, range, Sequence[int]]]
    ) -> None:
        """Continue the event counters of the same shard, or in the first shard those of all.

        Args:
            ids, columns: of the part.
            old: ids, columns and counters of the shards that ids come from.
        """
        same = [counters for *shard, counters in old if shard == [ids, columns]]
        first = [counters for _, of, counters in old if of.start == 0]
        if same:
            self.counters = same[0]
        elif ids.begin > 0:
            self.counters = [0] * (Table.DEFAULT_SERVED + 1)
        else:
            self.counters = [sum(values) for values in zip(*first, strict=True)]

    def sort(self) -> None:
        """Sort the taken ids, for :func:`write_arriving`: it must not fail on one rank."""
        self.ascending, self.numbers = self.whole.ids.sort()

    # -- writing ---------------------------------------------------------------------------------

    def write(self, batch: RowBatch, places: int | Tensor) -> None:
        """Write rows, which :meth:`publish` gives to their ids; see :meth:`RowLoader.write`.

        Args:
            batch: some columns of some rows.
            places: int64 [n], numbers of the rows, in the order of the ids; or that of the first.
        """
        self.loader.write(self.table, batch, places)

    def publish(self) -> None:
        """Give the ids their rows, scores, counts and counters."""
        tables, table, index = self.tables, self.table, self.tables.index
        if self.seed is not None:
            index.meta[table, Meta.SEED] = self.seed
        scores = self.whole.scores or None
        self.loader.publish(table, [of.ids for of in self.taken], self.counted, scores)
        if self.counters is not None:
            counters = torch.tensor(self.counters[_COUNTERS], device=tables.device)
            index.tables[table, _COUNTERS] = counters
        if self.sketch is not None:
            sketch_of(tables, table).copy_(self.sketch)
        set_optimizer_steps(tables, table, self.optimizer_steps)


def outside(ids: Tensor, ascending: Tensor) -> Tensor:
    """Return which ids are not in a sorted list, bool [n].

    Args:
        ids: int64 [n].
        ascending: int64 [m].
    """
    if ascending.numel() == 0:
        return torch.ones_like(ids, dtype=torch.bool)
    places = torch.searchsorted(ascending, ids).clamp_(max=ascending.numel() - 1)
    return ascending[places] != ids


def _by_group(parts: Iterable[IntoPart]) -> list[list[IntoPart]]:
    groups: dict[int, list[IntoPart]] = {}
    for part in parts:
        groups.setdefault(id(part.tables), []).append(part)
    return list(groups.values())


def loaders_of(parts: Iterable[IntoPart]) -> list[RowLoader]:
    """Return a loader for the parts of each group, which they write with from now on.

    Args:
        parts: with all ids taken. Rows of a group lie in this order.
    """
    loaders = []
    for of_group in _by_group(parts):
        loader = RowLoader(of_group[0].tables, {part.table: part.count for part in of_group})
        loaders.append(loader)
        for part in of_group:
            part.loader = loader
    return loaders


def publish_all(parts: Iterable[IntoPart], *, forward: bool = False) -> None:
    """Publish the ids of parts, continue the clocks of their groups, and end their loads.

    Args:
        parts: on this rank, of whole groups or of some tables.
        forward: set the clocks first, so that missing scores are those of ids that are new then,
            and set none back. Otherwise clocks go back with whole groups.
    """
    for of_group in _by_group(parts):
        tables = of_group[0].tables
        whole = len(of_group) == len(tables.config.tables)
        if forward:
            _continue_clock(tables, of_group, back=False)
        for part in of_group:
            part.publish()
        if not forward:
            _continue_clock(tables, of_group, back=whole)
        of_group[0].loader.end()


def _continue_clock(tables: Tables, parts: Sequence[IntoPart], *, back: bool) -> None:
    """Continue the clock of a group from those of the rows that its parts get."""
    clock = tables.index.clock
    step, now = max(part.step for part in parts), max(part.now for part in parts)
    clock[Clock.STEP] = step if back else max(step, int(clock[Clock.STEP]))
    if tables.config.keeps_time and now > 0:
        set_time(tables, now if back else max(now, int(clock[Clock.NOW])))


def replace_content(
    ranks: Ranks,
    loaders: Sequence[RowLoader],
    write: Callable[[], None],
    publish: Callable[[], None],
    finish: Callable[[], None] = lambda: None,
) -> None:
    """Replace the content of tables on all ranks, or on none.

    Args:
        ranks: that load together; all call it.
        loaders: of the tables on this rank.
        write: writes rows; collective, and raises on all ranks.
        publish: publishes ids, on each rank for itself, while signals are deferred.
        finish: called after all ranks have published, on each rank for itself.

    Raises:
        Exception: of any rank, on all ranks.
    """

    def begin() -> None:
        for loader in loaders:
            loader.begin()

    with undone_after_error(loaders) as done:
        ranks.run(begin)
        write()
        with defer_signals():
            ranks.run(publish)
            ranks.run(finish)
            done()


def raise_first(failures: Iterable[Exception | None]) -> None:
    """Raise the first error, if there is one.

    Args:
        failures: what :func:`write_arriving` returned for each table.
    """
    for failure in failures:
        if failure is not None:
            raise failure


def write_arriving(
    exchange: RowExchange, sources: Sequence[Sent], parts: Mapping[Place, IntoPart]
) -> Exception | None:
    """Write rows that arrive at places of this rank; all ranks call it.

    Args:
        exchange: of a table.
        sources: rows to send, by column shard that has them.
        parts: of the table on this rank, by place, with sorted ids.

    Returns:
        The error of this rank; None: there was none.
    """

    def write(arrived: ArrivedBlock) -> None:
        part = parts[arrived.place]
        part.write(arrived.batch, part.numbers[arrived.numbers])

    arriving = {place: part.ascending for place, part in parts.items()}
    return use_each(exchange.blocks(sources, arriving), write) or exchange.failure


__all__ = [
    "IntoPart",
    "loaders_of",
    "outside",
    "publish_all",
    "raise_first",
    "replace_content",
    "write_arriving",
]
