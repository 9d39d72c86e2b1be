"""The content of one table without the places of its rows, to move between groups and ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.ops.columns import SKETCH_ROWS, PolicyColumn
from torch_dynemb.policy.layout import score_words_of
from torch_dynemb.table import row_access
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.tables import Tables, exported

_BATCH = 1 << 20


class CountedIds(NamedTuple):
    """Ids without a row and their occurrences: not admitted yet, or without room.

    Attributes:
        ids: int64 [n], ascending.
        counts: int64 [n], occurrences. With a half-life, logarithms as counters store them
            (``csrc/core/policy/waiting.h``).
    """

    ids: Tensor
    counts: Tensor


def score_names(tables: Tables, table: int) -> tuple[str, ...]:
    """Return the scores that a table itself stores, without those of other tables of the group."""
    return score_words_of([tables.config.tables[table]], tables.config.memory_budget is not None)


class TableEntries(NamedTuple):
    """Ids of an index table, in the order of its slots.

    Attributes:
        ids: int64 [n].
        handles: int64 [n]; of ids without a row, their counts less 1.
        words: int64 [n, words], scores in the order of ``layout.score_words``.
    """

    ids: Tensor
    handles: Tensor
    words: Tensor

    def ordered(self, order: Tensor) -> TableEntries:
        """Return the same ids in another order, int64 [n]."""
        return TableEntries(self.ids[order], self.handles[order], self.words[order])


def read_entries(tables: Tables, table: int) -> TableEntries:
    """Copy the ids of a table, or of a counter table."""
    batches = list(exported(tables, table, _BATCH))
    if not batches:
        none = torch.empty(0, dtype=torch.int64, device=tables.device)
        words = none.reshape(0, max(1, len(tables.config.layout.score_words)))
        return TableEntries(none, none, words)
    return TableEntries(
        torch.cat([batch.ids for batch in batches]),
        torch.cat([batch.handles for batch in batches]),
        torch.cat([batch.scores for batch in batches]),
    )


def sorted_entries(tables: Tables, table: int) -> TableEntries:
    """Copy the ids of a table, or of a counter table, in ascending order."""
    entries = read_entries(tables, table)
    return entries.ordered(torch.argsort(entries.ids))


def read_content(tables: Tables, table: int) -> RowBatch:
    """Copy a table's content, with ascending ids and the scores that the table itself stores."""
    ids, handles, words = sorted_entries(tables, table)
    scores = {
        name: words[:, tables.config.layout.word(name)].clone()
        for name in score_names(tables, table)
    }
    return row_access.read_rows(tables, table, ids, handles)._replace(scores=scores)


def read_counts(tables: Tables, table: int) -> CountedIds | None:
    """Return ids below admission with their counts; None: the table does not count them by id."""
    counters = tables.config.layout.counters[table]
    if counters is None:
        return None
    ids, counts, _ = sorted_entries(tables, counters)
    return CountedIds(ids, counts + 1)  # stored like handles, where 0 means an empty slot


def sketch_of(tables: Tables, table: int) -> Tensor:
    """Return the cells of a table's admission sketch, int32 [SKETCH_ROWS, width], a view."""
    of_policy = tables.config.layout.rows[table]
    begin, width = of_policy[PolicyColumn.SKETCH_BEGIN], of_policy[PolicyColumn.SKETCH_WIDTH]
    return tables.index.sketch[begin : begin + SKETCH_ROWS * width].view(SKETCH_ROWS, width)


def optimizer_steps(tables: Tables, table: int) -> int:
    """Return the number of updates of a table's optimizer."""
    return int(tables.rows.row_clock[table])


def set_optimizer_steps(tables: Tables, table: int, steps: int) -> None:
    """Set the number of updates of a table's optimizer."""
    tables.rows.row_clock[table] = steps


__all__ = [
    "CountedIds",
    "TableEntries",
    "optimizer_steps",
    "read_content",
    "read_counts",
    "read_entries",
    "score_names",
    "set_optimizer_steps",
    "sketch_of",
    "sorted_entries",
]
