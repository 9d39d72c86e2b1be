"""The content of one table, apart from where its rows lie: what moves between groups and ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.policy.layout import score_words_of
from torch_dynemb.table import row_access
from torch_dynemb.table.tables import Tables, exported

_BATCH = 1 << 20


class TableContent(NamedTuple):
    """Ids of a table with everything that is kept of them.

    Attributes:
        ids: int64 [n], ascending.
        rows: [n, dim], of the dtype of the table.
        state: optimizer state by name: [n, columns]; empty: fresh.
        scores: int64 [n, words], in the order of :func:`score_names` where it was read.
    """

    ids: Tensor
    rows: Tensor
    state: dict[str, Tensor]
    scores: Tensor


class CountedIds(NamedTuple):
    """Ids that have no row, and how often they have been seen: too seldom, or there was no room.

    Attributes:
        ids: int64 [n], ascending.
        counts: int64 [n].
    """

    ids: Tensor
    counts: Tensor


def score_names(tables: Tables, table: int) -> tuple[str, ...]:
    """What a table keeps of its ids: its own scores, not those of other tables of the group."""
    return score_words_of([tables.config.tables[table]], tables.config.memory_budget is not None)


def _sorted_entries(tables: Tables, table: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids of an index table, ascending, with their handles and score words."""
    batches = list(exported(tables, table, _BATCH))
    if not batches:
        none = torch.empty(0, dtype=torch.int64, device=tables.device)
        return none, none, none.reshape(0, max(1, len(tables.config.layout.score_words)))
    ids = torch.cat([batch.ids for batch in batches])
    order = torch.argsort(ids)
    handles = torch.cat([batch.handles for batch in batches])
    scores = torch.cat([batch.scores for batch in batches])
    return ids[order], handles[order], scores[order]


def read_content(tables: Tables, table: int) -> TableContent:
    """A copy of a table's content."""
    ids, handles, words = _sorted_entries(tables, table)
    rows = row_access.read_rows(tables, table, ids, handles)
    state = {
        name: values if values.dim() == 2 else values[:, None]
        for name, values in rows.state.items()
    }
    names = score_names(tables, table)
    kept = [tables.config.layout.score_words.index(name) for name in names]
    return TableContent(ids, rows.weights, state, words[:, kept])


def read_counts(tables: Tables, table: int) -> CountedIds | None:
    """Ids that wait for admission; None: the table does not count them by id."""
    counters = tables.config.layout.counters[table]
    if counters is None:
        return None
    ids, counts, _ = _sorted_entries(tables, counters)
    return CountedIds(ids, counts + 1)  # stored as handles are, where 0 is an empty slot


def optimizer_steps(tables: Tables, table: int) -> int:
    """Updates that a table's optimizer has made."""
    return int(tables.rows.row_clock[table])


def set_optimizer_steps(tables: Tables, table: int, steps: int) -> None:
    """Goes on counting updates from here."""
    tables.rows.row_clock[table] = steps


__all__ = [
    "CountedIds",
    "TableContent",
    "optimizer_steps",
    "read_content",
    "read_counts",
    "score_names",
    "set_optimizer_steps",
]
