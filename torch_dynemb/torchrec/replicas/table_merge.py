"""Merge of one table of several sharding groups: records, values, and the update of the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.policy.half_life import time_of
from torch_dynemb.rows.row_update import RowUpdate
from torch_dynemb.table.content import CountedIds, optimizer_steps, score_names
from torch_dynemb.table.evictions import evicted_ids, record_as_evicted
from torch_dynemb.table.lookup import find
from torch_dynemb.table.row_access import (
    read_rows,
    state_names,
    write_initial_values,
)
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.tables import Tables, one_table
from torch_dynemb.table.waiting_counts import CountUpdate
from torch_dynemb.torchrec.replicas import merged_scores
from torch_dynemb.torchrec.replicas.capacity import beyond_capacity
from torch_dynemb.torchrec.replicas.common_base import CommonBase, Touched
from torch_dynemb.torchrec.replicas.merged_scores import OfGroups
from torch_dynemb.torchrec.replicas.peer_exchange import bytes_of_row, joined_bytes, unpacked

_HERE = 1  # flags of a record
_RESTARTED = 2

_BLOCK_BYTES = 8 << 20  # of records that are exchanged at once


class LatestClocks(NamedTuple):
    """Clocks of a table, the latest ones of all sharding groups.

    Attributes:
        step: training steps of its group.
        now: seconds.
        updates: of the table's optimizer.
    """

    step: int
    now: int
    updates: int


class TableMerge:
    """Merge of one table, from its touched ids to the update. Call the methods in their order.

    Args:
        base: of the table's group.
        table: number of the table.
        touched: ids of this group.
    """

    def __init__(self, base: CommonBase, table: int, touched: Touched) -> None:
        self._base, self._table, self.touched = base, table, touched
        tables = self._tables
        self._words = score_names(tables, table)
        config = tables.config.tables[table]
        self._name = config.name
        self._counts = tables.config.layout.counters[table] is not None
        # a count that decays is not a number of occurrences
        self._admitted = self._counts and config.policy.admission_ticks == 0
        self._rows: RowUpdate | None = None
        self._waiting: CountUpdate | None = None

    @property
    def _tables(self) -> Tables:
        return self._base.group.tables

    @property
    def updates(self) -> int:
        """Number of updates of the table's optimizer."""
        return optimizer_steps(self._tables, self._table)

    def unite(
        self, ids: Sequence[Tensor], removed: Sequence[Tensor], waiting: Sequence[Tensor]
    ) -> None:
        """Take the touched ids of all groups.

        Args:
            ids, removed, waiting: as in :class:`Touched`, by group.
        """
        self.ids = torch.cat(list(ids)).unique()
        gone = torch.cat(list(removed)).unique()
        self.removed = gone[~torch.isin(gone, self.ids)]
        counted = torch.cat(list(waiting)).unique()
        self.waiting = counted[~torch.isin(counted, self.ids)]
        self._handles = self._find(self.ids)
        self._before = self._base.scores_of(self._table, self.ids, self._handles)
        layout = self._tables.config.layout
        columns = [layout.word(name) for name in self._words]
        self._base_words = self._before.words[:, columns]
        self._like = self._values(slice(0, 0))

    # -- records --------------------------------------------------------------------------------

    def blocks(self) -> Iterator[slice]:
        """Yield parts of the united ids, with records of some megabytes; equal in all groups."""
        size, count = max(1, _BLOCK_BYTES // bytes_of_row(self._like)), self.ids.numel()
        for begin in range(0, count, size):
            yield slice(begin, min(begin + size, count))

    def no_records(self, count: int) -> Tensor:
        """Return records of zeros, uint8 [count, bytes], which nothing may use."""
        return torch.zeros(count, bytes_of_row(self._like), dtype=torch.uint8, device=self._device)

    def no_merged(self, count: int) -> list[Tensor]:
        """Return weights, optimizer state and scores without content, [count, ...] each."""
        rows = self._like[: 1 + len(self._state) + len(self._words)]
        return [of.new_zeros(count, *of.shape[1:]) for of in rows]

    def no_merged_bytes(self, count: int) -> Tensor:
        """Return :meth:`no_merged` as uint8 [count, bytes]."""
        return joined_bytes(self.no_merged(count))

    def records(self, part: slice) -> Tensor:
        """Return this group's values of a part of the united ids, uint8 [m, bytes]."""
        return joined_bytes(self._values(part))

    def waiting_records(self) -> Tensor:
        """Return this group's counts of the united waiting ids, int64 [k]."""
        return self._base.counts_of(self._table, self.waiting)[1]

    def merged(self, records: Sequence[Tensor], part: slice, clocks: LatestClocks) -> Tensor:
        """Merge records of all groups.

        Args:
            records: uint8 [m, bytes] of each group.
            part: of the united ids, which they are for.
            clocks: the latest of all groups.

        Returns:
            Weights, optimizer state and scores, uint8 [m, bytes].
        """
        groups = [unpacked(of, self._like) for of in records]
        rows = 1 + len(self._state)
        result = [merged_scores.mean_of([of[number] for of in groups]) for number in range(rows)]
        flags = torch.stack([of[-1] for of in groups])
        here, restarted = (flags & _HERE) > 0, (flags & _RESTARTED) > 0
        known = self._before.known[part]
        for number, name in enumerate(self._words):
            values = torch.stack([of[rows + number] for of in groups])
            of_word = OfGroups(values, here, restarted, self._base_words[part, number], known)
            result.append(self._merged_score(name, of_word, groups, part, clocks))
        return joined_bytes(result)

    def merged_waiting(self, counts: Sequence[Tensor], part: slice, clocks: LatestClocks) -> Tensor:
        """Merge counts of admission of all groups, int64 [m].

        Args:
            counts: int64 [m] of each group.
            part: of the united waiting ids, which they are for.
            clocks: the latest of all groups.
        """
        base, _ = self._base.counts_of(self._table, self.waiting[part])
        ticks = self._tables.config.tables[self._table].policy.admission_ticks
        now = time_of(ticks, step=clocks.step, now=clocks.now) if ticks else None
        return merged_scores.waiting_counts(torch.stack(list(counts)), base, now)

    def _merged_score(
        self,
        name: str,
        of: OfGroups,
        groups: Sequence[Sequence[Tensor]],
        part: slice,
        clocks: LatestClocks,
    ) -> Tensor:
        policy = self._tables.config.tables[self._table].policy
        if name == "frequency":
            none = torch.zeros_like(of.base)
            waiting = [group[-2] if self._admitted else none for group in groups]
            base = self._base.counts_of(self._table, self.ids[part])[0] if self._admitted else none
            return merged_scores.frequency(of, torch.stack(waiting), base)
        if name == "decayed":
            ticks = policy.half_life_ticks
            now = time_of(ticks, step=clocks.step, now=clocks.now)
            return merged_scores.decayed(of, now)
        if name == "custom" and policy.combine == "sum":
            return merged_scores.summed(of)
        if name == "custom" and policy.combine == "last":
            return merged_scores.last_given(of)
        return merged_scores.latest(of)

    # -- the update -----------------------------------------------------------------------------

    def prepare(self, merged: Sequence[Tensor], waiting: Tensor, clocks: LatestClocks) -> None:
        """Prepare the update of the table, which changes nothing visible.

        Args:
            merged: values of all united ids as :meth:`no_merged` has them, [n, ...] each.
            waiting: int64 [k], counts of all united waiting ids.
            clocks: the latest of all groups.

        Raises:
            NoRoomError: the ids of all groups exceed the capacity of a table that does not evict.
            RuntimeError: memory is short.
        """
        tables, table, rows = self._tables, self._table, 1 + len(self._state)
        scores = dict(zip(self._words, merged[rows:], strict=True))
        dropped = beyond_capacity(tables, table, self.ids, scores, self._before.known, self.removed)
        stays = ~torch.isin(self.ids, dropped)
        self._evicted = evicted_ids(tables, table, dropped)
        if dropped.numel() > 0:
            merged = [of[stays] for of in merged]
        weights, *others = merged
        self._rows = RowUpdate(
            f"sync: table {self._name!r}",
            tables,
            table,
            RowBatch(
                self.ids[stays],
                weights,
                dict(zip(self._state, others[: rows - 1], strict=True)),
                dict(zip(self._words, others[rows - 1 :], strict=True)),
            ),
            gone=torch.cat([self.removed, dropped]),
            steps=clocks.updates,
        )
        if self._counts:
            # an id with a row waits no more
            now = self._base.counts_of(table, self.ids)[1]
            ids = torch.cat([self.waiting, self.ids[stays & (now > 0)]])
            after = torch.cat([waiting, torch.zeros_like(ids[self.waiting.numel() :])])
            before = self._base.counts_of(table, ids)[1]
            self._waiting = CountUpdate(tables, table, CountedIds(ids, before), after)
        self._rows.prepare()

    def apply(self) -> None:
        """Apply the update.

        Raises:
            RuntimeError: memory is short, or a disk fails.
        """
        assert self._rows is not None
        self._rows.apply()
        if self._waiting is not None:
            self._waiting.apply()

    def undo(self) -> None:
        """Restore the table from before :meth:`apply`, wherever that failed."""
        assert self._rows is not None
        self._rows.undo()
        if self._waiting is not None:  # after the rows: ids with a row are not counted
            self._waiting.undo()

    def finish(self) -> int:
        """Record evicted ids; return how many there are."""
        record_as_evicted(self._tables, self._table, self._evicted)
        return self._evicted.ids.numel()

    # -- values of this group -------------------------------------------------------------------

    @property
    def _state(self) -> list[str]:
        return state_names(self._tables)

    def _find(self, ids: Tensor) -> Tensor:
        return find(self._tables, *one_table(self._tables, self._table, ids)).handles

    def _score(self, ids: Tensor, name: str) -> Tensor:
        tables = self._tables
        flat, offsets, features = one_table(tables, self._table, ids)
        word = tables.config.layout.word(name)
        return ops.get_scores(tables.index, flat, offsets, features, word=word).scores

    @property
    def _device(self) -> torch.device:
        return self._tables.device

    def _values(self, part: slice) -> list[Tensor]:
        """Return rows, state, scores, counts and flags of a part of the united ids."""
        ids, here = self.ids[part], self._handles[part] >= 0
        rows = self._row_values(ids, self._handles[part])
        flags = here * _HERE + self._before.restarted[part] * _RESTARTED
        scores = [self._score(ids, name) for name in self._words]
        scores += [self._base.counts_of(self._table, ids)[1]] if self._admitted else []
        state = [rows.state[name] for name in self._state]
        return [rows.rows, *state, *scores, flags.to(torch.uint8)]

    def _row_values(self, ids: Tensor, handles: Tensor) -> RowBatch:
        """Return rows and state of some ids; initial ones of ids without a row."""
        tables, table = self._tables, self._table
        here = (handles >= 0).nonzero()[:, 0]
        found = read_rows(tables, table, ids[here], handles[here])
        if here.numel() == ids.numel():
            return found

        def placed(values: Tensor) -> Tensor:
            whole = values.new_zeros(ids.numel(), *values.shape[1:])
            whole[here] = values
            return whole

        written = torch.zeros_like(ids, dtype=torch.bool)
        written[here] = True
        batch = found.each(placed)._replace(ids=ids)
        write_initial_values(tables, table, batch, written)
        return batch


__all__ = ["LatestClocks", "TableMerge"]
