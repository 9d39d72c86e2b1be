"""Rows from elsewhere that change some ids of a table, and leave the others as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import NoRoomError
from torch_dynemb.ops.columns import OnFull, PolicyColumn, Table
from torch_dynemb.table.content import optimizer_steps, score_names, set_optimizer_steps
from torch_dynemb.table.lookup import find
from torch_dynemb.table.removal import erase
from torch_dynemb.table.row_access import read_rows, write_rows
from torch_dynemb.table.tables import Tables, one_table


class RowUpdate:
    """Writes rows of a table, with new ids where there are some, and removes other ids.

    :meth:`prepare` and :meth:`apply` come first, and :meth:`finish` last. After an error in
    between, :meth:`undo` brings back what was. New ids get rows whatever admission says, and no
    other id is evicted for them.

    Args:
        where: begins errors.
        tables: of the group.
        table: its number.
        ids: int64 [n], every id once.
        rows: [n, columns].
        state: optimizer state by name, [n] or [n, columns] each; that of a new row is fresh, and of
            other rows it stays, where it is not given.
        scores: int64 [n] by word; others stay, or are those of new ids.
        gone: int64 [m], ids that are removed; those that are not there, or among ``ids``, are left
            out.
        first_column: which column of the table the first one of ``rows`` is.
        steps: that the optimizer has made then; None: they stay.

    Attributes:
        ids, gone: as given, without what is left out.
        new: bool [n], which ids are new.
    """

    def __init__(
        self,
        where: str,
        tables: Tables,
        table: int,
        ids: Tensor,
        rows: Tensor,
        *,
        state: Mapping[str, Tensor] | None = None,
        scores: Mapping[str, Tensor] | None = None,
        gone: Tensor | None = None,
        first_column: int = 0,
        steps: int | None = None,
    ) -> None:
        self._where, self._tables, self._table = where, tables, table
        self._rows, self._first_column, self._steps = rows, first_column, steps
        self._state, self._scores = state or {}, scores or {}
        self.ids = ids
        self.new = self._handles(ids) < 0
        gone = ids.new_empty(0) if gone is None else gone[~torch.isin(gone, ids)]
        self.gone = gone[self._handles(gone) >= 0]
        self._back: Callable[[], RowUpdate] | None = None

    def prepare(self) -> None:
        """Makes room, and copies of what will change.

        Raises:
            RuntimeError: memory is short.
        """
        tables, table = self._tables, self._table
        tables.check_own()
        new = self.ids[self.new]
        if new.numel() > 0:
            size = int(tables.index.tables[table, Table.SIZE])
            ops.grow_(tables.index, table, size - self.gone.numel() + new.numel())
        ids = torch.cat([self.ids[~self.new], self.gone])
        values = read_rows(tables, table, ids, self._handles(ids))
        self._back = partial(
            RowUpdate,
            self._where,
            tables,
            table,
            ids,
            values.weights,
            state=values.state,
            scores={word: self._scores_of(ids, word) for word in score_names(tables, table)},
            gone=new,
            steps=optimizer_steps(tables, table),
        )

    def apply(self) -> None:
        """Makes the change.

        Raises:
            RuntimeError: memory is short, or the group's budget is used by other tables.
        """
        tables, table = self._tables, self._table
        if self.gone.numel() > 0:
            erase(tables, table, self.gone)
        self._insert(self.ids[self.new])
        if self.ids.numel() > 0:
            flat, offsets, features = one_table(tables, table, self.ids)
            handles = find(tables, flat, offsets, features).handles
            first = self._first_column
            write_rows(tables, table, flat, handles, self._rows, self._state, first_column=first)
            for word, scores in self._scores.items():
                number = tables.config.layout.word(word)
                ops.set_scores_(
                    tables.index, flat, offsets, features, scores.contiguous(), word=number
                )
        if self._steps is not None:
            set_optimizer_steps(tables, table, self._steps)

    def undo(self) -> None:
        """Brings everything back as it was before :meth:`apply`, at whatever point that failed."""
        assert self._back is not None
        self._back().apply()

    def finish(self) -> None:
        """Forgets how often the new ids have been seen: they wait for a row no longer."""
        tables = self._tables
        counters = tables.config.layout.counters[self._table]
        new = self.ids[self.new]
        if counters is not None and new.numel() > 0:
            flat, offsets, _ = one_table(tables, self._table, new)
            ops.erase_(tables.index, flat, offsets, [counters])

    def _handles(self, ids: Tensor) -> Tensor:
        return find(self._tables, *one_table(self._tables, self._table, ids)).handles

    def _scores_of(self, ids: Tensor, word: str) -> Tensor:
        flat, offsets, features = one_table(self._tables, self._table, ids)
        number = self._tables.config.layout.word(word)
        return ops.get_scores(self._tables.index, flat, offsets, features, word=number).scores

    def _insert(self, ids: Tensor) -> None:
        if ids.numel() == 0:
            return
        tables, table, index = self._tables, self._table, self._tables.index
        rule = tables.config.layout.assign_rows[table : table + 1]
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
                f"{self._where} has no room for {ids.numel()} new ids: give the group more memory "
                "or rows, as the one has that they come from. None of them stays",
                tables=[tables.config.names[table]],
            )


__all__ = ["RowUpdate"]
