"""Change of some ids of a table by rows from outside, such as a commit of a log."""

from __future__ import annotations

from collections.abc import Callable
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
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.tables import Tables, one_table


class RowUpdate:
    """Update of a table: writes rows, inserts new ids, and removes other ids.

    Call :meth:`prepare`, then :meth:`apply`, then :meth:`finish`. After an error in between,
    :meth:`undo` restores the table. New ids get rows without admission, and no id is evicted for
    them.

    Args:
        where: beginning of an error's message.
        tables: of the group.
        table: its number.
        batch: ids without duplicates, and their rows. Missing state starts fresh in new rows and
            stays in others; missing scores are those of new ids, or stay.
        gone: int64 [m], ids to remove; unknown ids, and those of the batch, are skipped.
        steps: number of the optimizer's updates afterwards; None: unchanged.

    Attributes:
        ids: of the batch.
        gone: ids to remove, without the skipped ones.
        new: bool [n], which ids are new.
    """

    def __init__(
        self,
        where: str,
        tables: Tables,
        table: int,
        batch: RowBatch,
        *,
        gone: Tensor | None = None,
        steps: int | None = None,
    ) -> None:
        self._where, self._tables, self._table = where, tables, table
        self._batch, self._steps = batch, steps
        self.ids = ids = batch.ids
        self.new = self._handles(ids) < 0
        gone = ids.new_empty(0) if gone is None else gone[~torch.isin(gone, ids)]
        self.gone = gone[self._handles(gone) >= 0]
        self._back: Callable[[], RowUpdate] | None = None

    def prepare(self) -> None:
        """Grow the index for the new ids, and copy the content that will change.

        Raises:
            RuntimeError: memory is short.
        """
        tables, table = self._tables, self._table
        new = self.ids[self.new]
        if new.numel() > 0:
            size = int(tables.index.tables[table, Table.SIZE])
            ops.grow_(tables.index, table, size - self.gone.numel() + new.numel())
        self.copy_known()

    def copy_known(self) -> None:
        """Copy the content that will change, for :meth:`undo`."""
        tables, table = self._tables, self._table
        ids = torch.cat([self.ids[~self.new], self.gone])
        values = read_rows(tables, table, ids, self._handles(ids))
        self._back = partial(
            RowUpdate,
            self._where,
            tables,
            table,
            values._replace(
                scores={word: self._scores_of(ids, word) for word in score_names(tables, table)}
            ),
            gone=self.ids[self.new],
            steps=optimizer_steps(tables, table),
        )

    def apply(self) -> None:
        """Apply the update.

        Raises:
            InUseError: another thread is changing the tables now.
            RuntimeError: memory is short, or other tables use up the group's budget.
        """
        with self._tables.changing():
            self._apply()

    def _apply(self) -> None:
        tables, table = self._tables, self._table
        if self.gone.numel() > 0:
            erase(tables, table, self.gone)
        self._insert(self.ids[self.new])
        if self.ids.numel() > 0:
            flat, offsets, features = one_table(tables, table, self.ids)
            handles = find(tables, flat, offsets, features).handles
            write_rows(tables, table, self._batch, handles)
            for word, scores in self._batch.scores.items():
                number = tables.config.layout.word(word)
                ops.set_scores_(
                    tables.index, flat, offsets, features, scores.contiguous(), word=number
                )
        if self._steps is not None:
            set_optimizer_steps(tables, table, self._steps)

    def undo(self) -> None:
        """Restore the content from before :meth:`apply`, wherever that failed."""
        assert self._back is not None
        self._back().apply()

    def finish(self) -> None:
        """Clear the admission counts of new ids, since they have a row now."""
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
            # raises the error of a GPU's kernel, if it refused the ids
            tables.memory.end_step(tables.index, tables.rows)
            raise NoRoomError(
                f"{self._where} has no room for {ids.numel()} new ids, and none was inserted: give "
                "the group as much memory or as many rows as the group that they come from",
                tables=[tables.config.names[table]],
            )


__all__ = ["RowUpdate"]
