"""Move of one table's content from the shards of an old plan to those of a new one.

The result has the bits of a checkpoint that was saved with the old plan and loaded with the new
one. All ranks call the methods in their order here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb.distributed.exchange import from_rank
from torch_dynemb.ops.columns import SKETCH_ROWS
from torch_dynemb.rows.exchange import Place, RowExchange, Sent
from torch_dynemb.rows.into_part import IntoPart, write_arriving
from torch_dynemb.table.content import CountedIds, sketch_of
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.shards import IdSlots
from torch_dynemb.torchrec.resharding.old_shards import (
    OldRows,
    OldShard,
    counts_in_order,
    part_of_place,
)
from torch_dynemb.torchrec.state.table_state import LocalTable, TableShape

_CELLS_AT_ONCE = 16 << 20  # 64 MiB


class MovedTable:
    """Content of a table on its way.

    Args:
        shape: of the table in the new plan.
        facts: of all old shards.
        here: old shards on this rank, with their rows.
        new: new shards on this rank.
        process_group: of all shards.
        device: of the rows.

    Attributes:
        facts: of all old shards, by columns, then by ids.
        new: new shards on this rank.
        parts: the ids that they get, by place.
    """

    def __init__(
        self,
        shape: TableShape,
        facts: Sequence[OldShard],
        here: Sequence[tuple[LocalTable, OldRows]],
        new: Iterable[LocalTable],
        *,
        process_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._name, self._shape = shape.name, shape
        self.facts = sorted(facts, key=lambda of: (of.columns.start, of.shard.ids))
        self._here, self.new = list(here), list(new)
        where = f"reshard: table {self._name!r} has"
        self.parts = {of.place: IntoPart(of.group.tables, of.table, where) for of in self.new}
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
        self._ids: list[RowBatch] = []
        self._counts: list[RowBatch] = []
        self._arrived: dict[Place, tuple[RowBatch, RowBatch | None]] = {}
        self._sketches: list[tuple[IdSlots, Tensor]] = []

    @property
    def ids_before(self) -> int:
        """Number of ids in the old shards."""
        return sum(of.ids for of in self.facts if of.columns.start == 0)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to others."""
        return self._exchange.sent_bytes

    def counts(self) -> int:
        """Return the number of ids that the new shards of this rank get, each id once."""
        return sum(part.count for place, part in self.parts.items() if place.first_column == 0)

    # -- ids -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the old shards fit together.

        Raises:
            RuntimeError: column shards have different ids; on all ranks.
        """
        first = {of.shard.ids: of for of in self.facts if of.columns.start == 0}
        for of in self.facts:
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
        if self.facts[0].counted:
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
        if self.facts[0].counted:
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
        facts = self.facts
        for new in self.new:
            part, shard = self.parts[new.place], new.shard
            found, waiting = self._arrived.pop(new.place)
            scores = dict(found.scores)
            order = torch.argsort(scores["order"])
            numbers = part_of_place(scores.pop("order")[order])
            ordered = found._replace(scores=scores).picked(order)
            for number in range(sum(of.columns.start == 0 for of in facts)):
                part.take(ordered.picked(numbers == number))
            part.make_room()
            part.sort()
            if waiting is not None:
                order = torch.argsort(waiting.scores["order"])
                part.counted = CountedIds(waiting.ids[order], waiting.scores["count"][order])
            part.take_sketches([of for ids, of in self._sketches if ids.shares(shard.ids)])
            part.seed = facts[0].seed
            old = [(of.shard.ids, of.columns, of.counters) for of in facts]
            part.continue_counters(shard.ids, shard.columns, old)
            part.step, part.now = max(of.step for of in facts), max(of.now for of in facts)
            part.optimizer_steps = max(
                of.optimizer_steps
                for of in facts
                if of.shard.ids.shares(shard.ids)
                and of.columns.start < shard.columns.stop
                and shard.columns.start < of.columns.stop
            )

    def _part_of(self, local: LocalTable) -> int:
        """Return the number of an old shard among those with the first column."""
        first = [of.rank for of in self.facts if of.columns.start == 0]
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
        for of in self.facts:
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

    # -- rows ------------------------------------------------------------------------------------

    def send_rows(self) -> Exception | None:
        """Send rows to the new shards, which write them before any id has them.

        Returns:
            The error of this rank; None: there was none.
        """
        return write_arriving(self._exchange, self._sources, self.parts)


def _first_column(local: LocalTable) -> int:
    return local.place.first_column


def _no_ids(*scores: str) -> RowBatch:
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    return RowBatch.without_rows(none, dict.fromkeys(scores, none))


__all__ = ["MovedTable"]
