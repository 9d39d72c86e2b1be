"""The content of one table, apart from where its rows lie: what moves between groups and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import Meta, PolicyColumn, RowClock, Table
from torch_dynemb.policy.admission import AdmitFrequent, AdmitFrequentSketch
from torch_dynemb.policy.layout import score_words_of
from torch_dynemb.process.interrupts import held_back
from torch_dynemb.table import removal
from torch_dynemb.table.lookup import find
from torch_dynemb.table.rows import handle_rows, insert_or_assign
from torch_dynemb.table.tables import Tables, exported, one_table

_BATCH = 1 << 20
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


def _state_tensors(tables: Tables, table: int) -> dict[str, Tensor]:
    slab, slabs = int(tables.index.meta[table, Meta.SLAB]), len(tables.config.slabs)
    config = tables.config.optimizer
    state = () if config is None else config.state
    return {tensor.name: tables.rows.state[k * slabs + slab] for k, tensor in enumerate(state)}


def read_content(tables: Tables, table: int) -> TableContent:
    """A copy of a table's content; :meth:`TableGroup.materialize` must have been called."""
    ids, handles, words = _sorted_entries(tables, table)
    numbers = handle_rows(handles)
    slab = int(tables.index.meta[table, Meta.SLAB])
    state = {
        name: tensor[numbers] if tensor.dim() == 2 else tensor[numbers][:, None]
        for name, tensor in _state_tensors(tables, table).items()
    }
    names = score_names(tables, table)
    kept = [tables.config.layout.score_words.index(name) for name in names]
    return TableContent(ids, tables.rows.weights[slab][numbers], state, words[:, kept])


def read_counts(tables: Tables, table: int) -> CountedIds | None:
    """Ids that wait for admission; None: the table does not count them by id."""
    counters = tables.config.layout.counters[table]
    if counters is None:
        return None
    ids, counts, _ = _sorted_entries(tables, counters)
    return CountedIds(ids, counts + 1)  # stored as handles are, where 0 is an empty slot


def clear(tables: Tables, table: int) -> None:
    """Removes all ids of a table, and those that wait for admission."""
    removal.clear(tables, table)
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
        RuntimeError: the table is full, or memory is short; it is empty then.
    """
    with held_back():
        try:
            _replace(tables, table, content, counted, names)
        except BaseException:
            clear(tables, table)
            raise


def _replace(
    tables: Tables,
    table: int,
    content: TableContent,
    counted: CountedIds | None,
    names: Sequence[str],
) -> None:
    clear(tables, table)
    ops.grow_(tables.index, table, content.ids.numel())
    if counted is not None and counted.ids.numel() > 0:
        write_counts(tables, table, counted)
    if content.ids.numel() == 0:
        return
    insert_or_assign(tables, table, content.ids, content.rows)
    flat, offsets, features = one_table(tables, table, content.ids)
    handles = find(tables, flat, offsets, features).handles
    if bool((handles < 0).any()):
        raise RuntimeError(
            f"table {tables.config.tables[table].name!r} has no room for {content.ids.numel()} "
            "ids: give it a larger capacity"
        )
    numbers = handle_rows(handles)
    tensors = _state_tensors(tables, table)
    for name, values in content.state.items():
        tensor = tensors[name]
        tensor[numbers] = values.reshape(numbers.shape[0], *tensor.shape[1:])
    for column, name in enumerate(names):
        if name not in score_names(tables, table):
            continue
        ops.set_scores_(
            tables.index,
            flat,
            offsets,
            features,
            content.scores[:, column].contiguous(),
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
    "TableContent",
    "begin_step",
    "optimizer_steps",
    "read_content",
    "read_counts",
    "score_names",
    "set_optimizer_steps",
    "write_content",
    "write_counts",
]
