"""A commit's change of one table that trains: checked, applied, and undone after an error."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.delta_log.commits import TableDelta
from torch_dynemb.checkpoint.parts import TablePart
from torch_dynemb.errors import NoRoomError
from torch_dynemb.ops.columns import OnFull, PolicyColumn
from torch_dynemb.table.content import optimizer_steps, score_names, set_optimizer_steps
from torch_dynemb.table.lookup import find
from torch_dynemb.table.removal import erase
from torch_dynemb.table.row_access import read_rows, state_tensors, write_rows
from torch_dynemb.table.tables import Tables, one_table

_CUSTOM = "custom"


class _Rows(NamedTuple):
    """Ids with what belongs to them.

    Attributes:
        ids: int64 [n].
        rows: [n, columns].
        state: optimizer state by name, [n] or [n, columns] each; none: it stays, or is fresh.
        scores: int64 [n] by name of the score.
    """

    ids: Tensor
    rows: Tensor
    state: dict[str, Tensor]
    scores: dict[str, Tensor]


class PartChange:
    """What a commit does to a part of a table.

    Args:
        part: of a model, on this rank.
        delta: what the commit changes in the whole table.
    """

    def __init__(self, part: TablePart, delta: TableDelta) -> None:
        self._part, self._delta = part, delta
        self._tables: Tables = part.group.tables
        device, chosen = part.group.device, part.ids.owned(delta.ids)
        columns = slice(part.columns.start, part.columns.stop)
        whole = bool(chosen.all())

        def own(values: Tensor) -> Tensor:
            return (values if whole else values[chosen]).to(device)

        tensors = state_tensors(self._tables, self._tables.config.slab_of(part.table))
        self._with_state = delta.optimizer is not None and delta.optimizer == _name_of(part)
        self._new_rows = _Rows(
            own(delta.ids),
            own(delta.rows[:, columns]),
            {name: own(values) for name, values in delta.state.items() if name in tensors}
            if self._with_state
            else {},
            {name: own(of) for name, of in delta.scores.items() if name in self._score_names},
        )
        gone = delta.removed[part.ids.owned(delta.removed)].to(device)
        gone = gone[~torch.isin(gone, self._new_rows.ids)]
        self._there = self._handles(self._new_rows.ids) >= 0
        self._gone = gone[self._handles(gone) >= 0]
        self._before: _Rows | None = None
        self._steps = 0

    def check(self) -> None:
        """Refuses what the table cannot take; changes nothing.

        Raises:
            ValueError: the commit has the padding id, or lacks custom scores.
            NoRoomError: the table has no room.
        """
        part, name = self._part, self._part.name
        padding = part.config.padding_idx
        if padding is not None and bool((self._new_rows.ids == padding).any()):
            raise ValueError(
                f"follow: table {name!r} has the padding id {padding}, which has no row, but the "
                "commit has one for it: follow with a model like the one that is published"
            )
        given = _CUSTOM in self._delta.scores or self._delta.ids.numel() == 0
        if _CUSTOM in self._score_names and not given:
            raise ValueError(
                f"follow: table {name!r} keeps custom scores, which the table in the log does not: "
                "follow with a model like the one that is published"
            )
        bound, new = self._tables.config.capacity_bound(part.table), int((~self._there).sum())
        size, gone = part.group.size(part.table), self._gone.numel()
        if bound is not None and new > 0 and size - gone + new > bound:
            raise NoRoomError(
                f"follow: table {name!r} has {size} ids and a capacity of {bound}, and the commit "
                f"takes {gone} of them away and brings {new}: give it the capacity of the table "
                "that is published. Nothing of the commit has been applied",
                tables=[name],
            )

    def prepare(self) -> None:
        """Makes room, and copies of what will change.

        Raises:
            RuntimeError: memory is short.
        """
        part, tables = self._part, self._tables
        tables.check_own()
        new = int((~self._there).sum())
        size = part.group.size(part.table) - self._gone.numel() + new
        if new > 0:
            ops.grow_(tables.index, part.table, size)
        ids = torch.cat([self._new_rows.ids[self._there], self._gone])
        handles = self._handles(ids)
        values = read_rows(tables, part.table, ids, handles)
        scores = {name: self._scores(ids, name) for name in self._score_names}
        self._before = _Rows(ids, values.weights, values.state, scores)
        self._steps = optimizer_steps(tables, part.table)

    def apply(self) -> None:
        """Takes the change, which was prepared.

        Raises:
            RuntimeError: memory is short, or the group's budget is used by other tables;
                :meth:`undo` puts back what has been changed.
        """
        part, tables = self._part, self._tables
        if self._gone.numel() > 0:
            erase(tables, part.table, self._gone)
        self._insert(self._new_rows.ids[~self._there])
        self._write(self._new_rows)
        if self._with_state:
            set_optimizer_steps(tables, part.table, self._delta.optimizer_steps)

    def undo(self) -> None:
        """Puts everything back as it was before :meth:`apply`, at whatever point that failed."""
        part, tables = self._part, self._tables
        assert self._before is not None
        new = self._new_rows.ids[~self._there]
        if new.numel() > 0:
            erase(tables, part.table, new)
        self._insert(self._gone[self._handles(self._gone) < 0])
        self._write(self._before)
        set_optimizer_steps(tables, part.table, self._steps)

    def finish(self) -> None:
        """Forgets counts of ids that have a row now; after all tables have taken the commit."""
        tables = self._tables
        counters = tables.config.layout.counters[self._part.table]
        new = self._new_rows.ids[~self._there]
        if counters is not None and new.numel() > 0:
            flat, offsets, _ = one_table(tables, self._part.table, new)
            ops.erase_(tables.index, flat, offsets, [counters])

    @property
    def _score_names(self) -> tuple[str, ...]:
        return score_names(self._tables, self._part.table)

    def _handles(self, ids: Tensor) -> Tensor:
        return find(self._tables, *one_table(self._tables, self._part.table, ids)).handles

    def _scores(self, ids: Tensor, name: str) -> Tensor:
        flat, offsets, features = one_table(self._tables, self._part.table, ids)
        word = self._tables.config.layout.word(name)
        return ops.get_scores(self._tables.index, flat, offsets, features, word=word).scores

    def _insert(self, ids: Tensor) -> None:
        """Gives ids rows, whatever admission says; no other id is evicted for them."""
        if ids.numel() == 0:
            return
        tables, table = self._tables, self._part.table
        rule = tables.config.layout.assign_rows[table : table + 1]
        index = tables.index
        if rule:
            policy = index.policy.clone()
            if int(policy[rule[0], PolicyColumn.ON_FULL]) != OnFull.GROW:
                policy[rule[0], PolicyColumn.ON_FULL] = OnFull.DEFAULT
            index = index._replace(policy=policy)
        flat, offsets, features = one_table(tables, table, ids)
        handles = ops.find_or_insert_(index, flat, offsets, None, features, rule)
        if bool((handles < 0).any()):
            # if a GPU has refused the ids, it says why here
            tables.memory.end_step(tables.index, tables.rows)
            raise NoRoomError(
                f"follow: table {self._part.name!r} has no room for {ids.numel()} new ids of the "
                "commit: give the group more memory or rows, as the one that is published has. "
                "Nothing of the commit has been applied",
                tables=[self._part.name],
            )

    def _write(self, rows: _Rows) -> None:
        if rows.ids.numel() == 0:
            return
        tables, table = self._tables, self._part.table
        flat, offsets, features = one_table(tables, table, rows.ids)
        handles = find(tables, flat, offsets, features).handles
        write_rows(tables, table, flat, handles, rows.rows, rows.state)
        for name, scores in rows.scores.items():
            word = tables.config.layout.word(name)
            ops.set_scores_(tables.index, flat, offsets, features, scores.contiguous(), word=word)


def _name_of(part: TablePart) -> str | None:
    return None if part.optimizer is None else str(part.optimizer.description()["name"])


__all__ = ["PartChange"]
