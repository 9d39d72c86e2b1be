"""The content of one table, apart from where its rows lie: what moves between groups and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import NoRoomError
from torch_dynemb.ops.columns import (
    PolicyColumn,
    RowClock,
    Table,
)
from torch_dynemb.policy.admission import AdmitFrequent, AdmitFrequentSketch
from torch_dynemb.policy.layout import score_words_of
from torch_dynemb.process.interrupts import held_back
from torch_dynemb.table import removal, row_access
from torch_dynemb.table.lookup import find
from torch_dynemb.table.tables import Tables, exported, one_table

_BATCH = 1 << 20
_IDS_OF_A_CALL = 1 << 18  # whose scratch is then a few megabytes
_LOOKUPS = [Table.FOUND, Table.MISSED, Table.REJECTED, Table.NOT_ADMITTED, Table.DEFAULT_SERVED]


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


def clear(tables: Tables, table: int) -> None:
    """Removes all ids of a table, and those that wait for admission."""
    for batch in exported(tables, table, _BATCH):
        removal.erase(tables, table, batch.ids)
    if isinstance(
        tables.config.tables[table].policy.admission, AdmitFrequent | AdmitFrequentSketch
    ):
        removal.reset_counts(tables, table)


def write_content(
    tables: Tables,
    table: int,
    content: TableContent,
    counted: CountedIds | None,
    names: Sequence[str],
) -> None:
    """Replaces the content of a table, while signals wait; see :func:`read_content` for shapes.

    Args:
        names: of the columns of ``content.scores``; those that the table does not keep are left
            out, those that it keeps and that are not there are those of new ids.

    Raises:
        NoRoomError: the table is full, or memory is short; it is empty then.
    """
    with held_back():
        try:
            replace_ids(tables, table, content.ids, counted)
            write_rows(tables, table, RowBlock(content.ids, 0, *content[1:]), names)
        except BaseException:
            clear(tables, table)
            raise


# -- writing in pieces ---------------------------------------------------------------------------


class RowBlock(NamedTuple):
    """Some columns of some rows of a table, and what else is kept of their ids.

    Attributes:
        ids: int64 [n], every id once.
        first_column: which column of the table the first one is.
        rows: [n, columns].
        state: optimizer state by name: [n, columns], or [n, 1] where a row has one value.
        scores: int64 [n, words]; None: they stay as they are.
    """

    ids: Tensor
    first_column: int
    rows: Tensor
    state: Mapping[str, Tensor]
    scores: Tensor | None


def check_ids(tables: Tables, table: int, ids: Tensor) -> None:
    """Finds what would make :func:`replace_ids` fail, memory apart, before anything changes.

    Args:
        ids: int64 [n].

    Raises:
        ValueError: the table has too small a capacity, or ids has its padding id.
    """
    config = tables.config.tables[table]
    bound = tables.config.capacity_bound(table)
    if bound is not None and ids.numel() > bound:
        raise ValueError(
            f"table {config.name!r} has no room for {ids.numel()} ids, only for {bound}: give it "
            "a larger capacity"
        )
    if config.padding_idx is not None and bool((ids == config.padding_idx).any()):
        raise ValueError(
            f"table {config.name!r} has the padding id {config.padding_idx}, which has no row, but "
            "there is a row for it: give the table the padding_idx it was saved with"
        )


def replace_ids(
    tables: Tables,
    table: int,
    ids: Tensor,
    counted: CountedIds | None,
) -> None:
    """Gives a table other ids; :func:`write_rows` has to follow for all columns of all of them.

    Nothing is undone after an error: the caller calls :func:`clear`.

    Args:
        ids: int64 [n], every id once.
        counted: ids that wait for a row; None: none do.

    Raises:
        NoRoomError: the table is full, or memory is short.
    """
    clear(tables, table)
    ops.grow_(tables.index, table, ids.numel())
    if counted is not None and counted.ids.numel() > 0:
        write_counts(tables, table, counted)
    rule = tables.config.layout.assign_rows[table : table + 1]
    counters = tables.config.layout.counters[table]
    # all ids before their scores, which could make them old enough for an eviction
    for some in ids.split(_IDS_OF_A_CALL) if ids.numel() > 0 else ():
        flat, offsets, features = one_table(tables, table, some)
        handles = ops.find_or_insert_(tables.index, flat, offsets, None, features, rule)
        if bool((handles < 0).any()):
            # if a GPU has refused the ids, it says why here
            tables.memory.end_step(tables.index, tables.rows)
            raise NoRoomError(
                f"table {tables.config.tables[table].name!r} has no room for {ids.numel()} "
                "ids: give it a larger capacity",
                tables=[tables.config.tables[table].name],
            )
        if counters is not None:  # ids that have a row wait no longer
            ops.erase_(tables.index, flat, offsets, [counters])


def write_rows(tables: Tables, table: int, block: RowBlock, names: Sequence[str]) -> None:
    """Writes what belongs to ids that :func:`replace_ids` has given the table.

    Optimizer state that is not given with the first columns of a row is that of a new row.

    Args:
        names: of the columns of ``block.scores``; see :func:`write_content`.
    """
    if block.ids.numel() == 0:
        return
    flat, offsets, features = one_table(tables, table, block.ids)
    handles = find(tables, flat, offsets, features).handles
    first = block.first_column
    row_access.write_rows(tables, table, flat, handles, block.rows, block.state, first_column=first)
    if block.scores is None:
        return
    for column, name in enumerate(names):
        if name not in score_names(tables, table):
            continue
        ops.set_scores_(
            tables.index,
            flat,
            offsets,
            features,
            block.scores[:, column].contiguous(),
            word=tables.config.layout.score_words.index(name),
        )


def write_counts(tables: Tables, table: int, counted: CountedIds) -> None:
    """Counts ids that have no row, also those that wait for room only.

    Args:
        table: which counts ids one by one.
        counted: ids that it does not count yet.
    """
    counters = tables.config.layout.counters[table]
    assert counters is not None
    policy = tables.index.policy.clone()
    policy[table, PolicyColumn.THRESHOLD] = 1 << 62  # beyond any count
    offsets = torch.tensor([0, counted.ids.numel()], device=tables.device)
    before = tables.index.tables[table, _LOOKUPS]
    index = tables.index._replace(policy=policy)
    ops.find_or_insert_(index, counted.ids, offsets, None, [table], [table])
    tables.index.tables[table, _LOOKUPS] = before  # nobody has looked anything up
    # stored as handles are, where 0 is an empty slot
    ops.set_handles_(
        tables.index,
        counted.ids,
        offsets,
        [counters],
        counted.counts - 1,
    )


def optimizer_steps(tables: Tables, table: int) -> int:
    """Updates that a table's optimizer has made."""
    return int(tables.rows.row_clock[table])


def set_optimizer_steps(tables: Tables, table: int, steps: int) -> None:
    """Goes on counting updates from here."""
    tables.rows.row_clock[table] = steps


def begin_step(tables: Tables) -> None:
    """After rows were replaced: a backward of an older forward raises, and none is forgotten."""
    end = len(tables.config.tables)
    tables.rows.row_clock[end + RowClock.UPDATES] += 1
    tables.rows.row_clock[end + RowClock.SINCE_STEP] = 0


__all__ = [
    "CountedIds",
    "RowBlock",
    "TableContent",
    "begin_step",
    "check_ids",
    "clear",
    "optimizer_steps",
    "read_content",
    "read_counts",
    "replace_ids",
    "score_names",
    "set_optimizer_steps",
    "write_content",
    "write_counts",
    "write_rows",
]
