"""Move of one table's content from the shards of an old plan to those of a new one.

The result has the bits of a checkpoint that was saved with the old plan and loaded with the new
one. All ranks call the methods in their order here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb.distributed.exchange import from_rank
from torch_dynemb.ops.columns import SKETCH_ROWS, Meta, Table
from torch_dynemb.parts.sketches import combined_sketch
from torch_dynemb.rows.exchange import ArrivedBlock, Place, RowExchange, Sent, use_each
from torch_dynemb.rows.loader import RowLoader, check_ids
from torch_dynemb.table.capacity_choice import ids_with_room
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.shards import IdSlots, TableShard
from torch_dynemb.torchrec.resharding.old_shards import (
    OldRows,
    OldShard,
    counts_in_order,
    part_of_place,
    sketch_of,
)
from torch_dynemb.torchrec.state.table_state import LocalTable, TableShape

_COUNTERS = slice(Table.INSERTED, Table.DEFAULT_SERVED + 1)
_CELLS_AT_ONCE = 16 << 20  # 64 MiB


class Incoming(NamedTuple):
    """Ids that a new shard on this rank gets.

    Attributes:
        ids: int64 [n], ascending.
        rows: int64 [n], numbers of their rows.
        pieces: the ids in the order of their rows, by old shard.
        scores: int64 [n] by name, in the order of rows.
        counted: ids that wait for admission; None: they are not counted one by one.
        sketches: admission sketches of the old shards that share ids.
    """

    ids: Tensor
    rows: Tensor
    pieces: list[Tensor]
    scores: dict[str, Tensor]
    counted: CountedIds | None
    sketches: list[Tensor]


class NewShard(NamedTuple):
    """A shard of the new plan on this rank.

    Attributes:
        local: its table.
        shard: its ids and columns.
    """

    local: LocalTable
    shard: TableShard


class MovedTable:
    """Content of a table on its way.

    Args:
        shape: of the table in the new plan.
        facts: of all old shards.
        here: old shards on this rank, with their rows.
        new: new shards on this rank.
        process_group: of all shards.
        device: of the rows.
    """

    def __init__(
        self,
        shape: TableShape,
        facts: Sequence[OldShard],
        here: Sequence[tuple[LocalTable, OldRows]],
        new: Sequence[NewShard],
        *,
        process_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._name, self._shape = shape.name, shape
        self._facts = sorted(facts, key=lambda of: (of.columns.start, of.shard.ids))
        self._here, self.new = list(here), list(new)
        self._process_group, self._device = process_group, device
        columns = sorted({(of.columns.start, of.columns.stop) for of in facts})
        self._columns = [range(*bounds) for bounds in columns]
        self._exchange = RowExchange(
            shape.places,
            self._columns,
            shape.optimizer.state,
            process_group=process_group,
            device=device,
        )
        self._sources: list[Sent] = []
        self._incoming: dict[Place, Incoming] = {}
        self._ids: list[RowBatch] = []
        self._counts: list[RowBatch] = []
        self._arrived: dict[Place, tuple[RowBatch, RowBatch | None]] = {}
        self._sketches: list[tuple[IdSlots, Tensor]] = []

    @property
    def name(self) -> str:
        """Name of the table in its collection."""
        return self._name

    @property
    def facts(self) -> list[OldShard]:
        """Facts of all old shards, by columns, then by ids."""
        return self._facts

    @property
    def ids_before(self) -> int:
        """Number of ids in the old shards."""
        return sum(of.ids for of in self._facts if of.columns.start == 0)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to others."""
        return self._exchange.sent_bytes

    def count(self, local: LocalTable) -> int:
        """Return the number of ids that a new shard gets."""
        return self._incoming[local.place].ids.numel()

    def counts(self) -> int:
        """Return the number of ids that the new shards of this rank get, each id once."""
        first = [new.local for new in self.new if _first_column(new.local) == 0]
        return sum(self.count(local) for local in first)

    # -- ids -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the old shards fit together.

        Raises:
            RuntimeError: column shards have different ids; on all ranks.
        """
        first = {of.shard.ids: of for of in self._facts if of.columns.start == 0}
        for of in self._facts:
            same = first[of.shard.ids]
            if (of.ids, of.ids_crc32c) != (same.ids, same.ids_crc32c):
                raise RuntimeError(
                    f"reshard: table {self._name!r}: its column shards on ranks {same.rank} and "
                    f"{of.rank} have {same.ids} and {of.ids} ids, not the same ones: evictions "
                    "have made them differ; shard a table that evicts by rows"
                )

    def prepare(self) -> None:
        """Collect what this rank sends first; not collective."""
        first = [(local, of) for local, of in self._here if _first_column(local) == 0]
        self._ids = [of.ids_in_order(self._part_of(local)) for local, of in first]
        if self._facts[0].counted:
            self._counts = [
                counts_in_order(local.group.tables, local.table, self._part_of(local))
                for local, _ in first
            ]

    def send_ids(self) -> None:
        """Send ids, scores, counts and sketches to the ranks of new shards; rows follow."""
        for columns in self._columns:
            rows = [of for local, of in self._here if _first_column(local) == columns.start]
            self._sources.append(self._exchange.sent(rows, self._no_rows(columns)))
        ids = self._exchange.sent(self._ids, _no_ids("order", *self._shape.scores))
        counts = None
        if self._facts[0].counted:
            counts = self._exchange.sent(self._counts, _no_ids("order", "count"))
        self._ids, self._counts = [], []
        for number in self._exchange.places:
            found = self._exchange.collected(ids, number)
            waiting = None if counts is None else self._exchange.collected(counts, number)
            mine = self._exchange.mine(number)
            if mine is not None:
                self._arrived[mine] = found, waiting
        self._send_sketches()

    def choose(self) -> None:
        """Choose the ids that the new shards of this rank have room for; not collective.

        Raises:
            ValueError: there is too little room, and no score to choose by; or the padding id is
                among the ids.
        """
        self._exchange.raise_failure()
        for new in self.new:
            self._choose(new)

    def _choose(self, new: NewShard) -> None:
        local, tables = new.local, new.local.group.tables
        found, waiting = self._arrived.pop(local.place)
        ordered = found.picked(torch.argsort(found.scores["order"]))
        ids, scores = ordered.ids, dict(ordered.scores)
        places = scores.pop("order")
        kept = ids_with_room(tables, local.table, ids, scores, f"reshard: table {self._name!r} has")
        if kept is not None:
            ids, places = ids[kept], places[kept]
            scores = {name: values[kept] for name, values in scores.items()}
        check_ids(tables, local.table, ids)
        parts = part_of_place(places)
        pieces = [ids[parts == part] for part in range(self._parts)]
        ascending = ids.sort()
        counted = None
        if waiting is not None:
            order = torch.argsort(waiting.scores["order"])
            counted = CountedIds(waiting.ids[order], waiting.scores["count"][order])
        self._incoming[local.place] = Incoming(
            ascending.values,
            ascending.indices,
            pieces,
            scores,
            counted,
            self._incoming_sketches(new.shard.ids),
        )

    @property
    def _parts(self) -> int:
        """Number of old shards with the first column."""
        return sum(of.columns.start == 0 for of in self._facts)

    def _part_of(self, local: LocalTable) -> int:
        """Return the number of an old shard among those with the first column."""
        first = [of.rank for of in self._facts if of.columns.start == 0]
        return first.index(local.place.rank)

    def _no_rows(self, columns: range) -> RowBatch:
        state = {
            tensor.name: torch.empty(
                0, tensor.columns(len(columns)), dtype=tensor.dtype, device="cpu"
            )
            for tensor in self._shape.optimizer.state
        }
        rows = torch.empty(0, len(columns), dtype=self._shape.dtype, device="cpu")
        return RowBatch(torch.empty(0, dtype=torch.int64, device="cpu"), rows, state)

    # -- sketches of admission -------------------------------------------------------------------

    def _send_sketches(self) -> None:
        """Send the sketch of each old shard to all ranks, in pieces; those that need it keep it."""
        for of in self._facts:
            if of.sketch_width == 0 or of.columns.start > 0:
                continue
            mine = [local for local, _ in self._here if _first_column(local) == 0]
            cells = None
            if mine and mine[0].place.rank == of.rank:
                cells = sketch_of(mine[0].group.tables, mine[0].table).reshape(-1)
            wanted = any(of.shard.ids.shares(new.shard.ids) for new in self.new)
            count, pieces = SKETCH_ROWS * of.sketch_width, []
            for begin in range(0, count, _CELLS_AT_ONCE):
                end = min(begin + _CELLS_AT_ONCE, count)
                piece = from_rank(
                    None if cells is None else cells[begin:end],
                    [end - begin],
                    torch.int32,
                    self._device,
                    dist.get_group_rank(self._process_group, of.rank),
                    self._process_group,
                    to_all=True,
                )
                assert piece is not None
                if wanted:
                    pieces.append(piece)
            if wanted:
                self._sketches.append((of.shard.ids, torch.cat(pieces).view(SKETCH_ROWS, -1)))

    def _incoming_sketches(self, ids: IdSlots) -> list[Tensor]:
        return [cells for of_shard, cells in self._sketches if of_shard.shares(ids)]

    # -- rows ------------------------------------------------------------------------------------

    def send_rows(self, loaders: dict[int, RowLoader]) -> Exception | None:
        """Send rows to the new shards, which write them before any id has them.

        Args:
            loaders: by id of the group, of the new shards on this rank; they have begun.

        Returns:
            The error of this rank; None: there was none.
        """
        local = {new.local.place: new.local for new in self.new}

        def write(arrived: ArrivedBlock) -> None:
            of = local[arrived.place]
            rows = self._incoming[arrived.place].rows[arrived.numbers]
            loaders[id(of.group)].write(of.table, arrived.batch, rows)

        arriving = {place: incoming.ids for place, incoming in self._incoming.items()}
        failure = use_each(self._exchange.blocks(self._sources, arriving), write)
        return failure or self._exchange.failure

    def publish(self, new: NewShard, loader: RowLoader) -> None:
        """Give a new shard its ids with scores, counts and counters; not collective.

        Args:
            new: the shard.
            loader: of its group.
        """
        tables, table = new.local.group.tables, new.local.table
        incoming = self._incoming[new.local.place]
        tables.index.meta[table, Meta.SEED] = self._facts[0].seed
        loader.publish(table, incoming.pieces, incoming.counted, incoming.scores)
        counters = torch.tensor(self._counters(new.shard)[_COUNTERS], device=tables.device)
        tables.index.tables[table, _COUNTERS] = counters
        if incoming.sketches:
            cells = sketch_of(tables, table)
            of_shards = [of.cpu() for of in incoming.sketches]
            cells.copy_(combined_sketch(of_shards, cells.shape[1]))

    def optimizer_steps(self, shard: TableShard) -> int:
        """Return the number of updates that a new shard continues from."""
        return max(
            of.optimizer_steps
            for of in self._facts
            if of.shard.ids.shares(shard.ids)
            and of.columns.start < shard.columns.stop
            and shard.columns.start < of.columns.stop
        )

    def _counters(self, shard: TableShard) -> list[int]:
        """Return the event counters of a new shard; the first one continues those of all."""
        for of in self._facts:
            if of.shard.ids == shard.ids and of.columns == shard.columns:
                return of.counters
        if shard.ids.begin > 0:
            return [0] * len(self._facts[0].counters)
        first = [of.counters for of in self._facts if of.columns.start == 0]
        return [sum(values) for values in zip(*first, strict=True)]


def _first_column(local: LocalTable) -> int:
    return local.place.first_column


def _no_ids(*scores: str) -> RowBatch:
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    return RowBatch.without_rows(none, dict.fromkeys(scores, none))


__all__ = ["MovedTable", "NewShard"]
