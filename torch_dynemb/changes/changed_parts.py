"""Description and records of a changed part of a table, for a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.changes.batch import COUNTS, ERASE, ROWS, SKETCH, Pieces
from torch_dynemb.changes.payloads import (
    LoggedPart,
    LogRows,
    in_form,
    of_tensors,
    payload_bytes,
    tensors_of_rows,
)
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.ops.columns import Table
from torch_dynemb.parts.saved_tables import NO_GROUP, SavedPart, described_table
from torch_dynemb.parts.sketches import sketch_cells
from torch_dynemb.parts.table_parts import TablePart
from torch_dynemb.rows.tensor_names import COUNT, ID
from torch_dynemb.rows.tensor_names import SKETCH as CELLS
from torch_dynemb.table.changes import ChangedIds, Changes, copy_rows
from torch_dynemb.table.clock import next_now
from torch_dynemb.table.content import optimizer_steps
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.lookup import find
from torch_dynemb.table.tables import Tables, exported, one_table

_RECORD_BYTES = 4 << 20  # largest record of rows; a reader keeps one record in memory
_COUNTS_AT_ONCE = 1 << 18


def logged_part(
    part: TablePart, rank: int, number: int, changed: ChangedIds, *, state: bool
) -> LoggedPart:
    """Describe a part of a table in a batch.

    Args:
        part: part of a model, on this rank.
        rank: rank of this process.
        number: number of the part in the batch.
        changed: ids with rows in the batch, and removed ids.
        state: whether the batch has optimizer state.
    """
    tables, table = part.group.tables, part.table
    split = len(part.columns) < part.embedding_dim
    counters = tables.config.layout.counters[table]
    cells = sketch_cells(tables.config, tables.index.sketch, table)
    optimized = state and part.optimizer is not None
    saved = SavedPart(
        rank=rank,
        first_column=part.columns.start,
        columns=len(part.columns),
        slots_begin=part.ids.begin,
        slots_end=part.ids.end,
        slots=part.ids.slots,
        ids=changed.ids.numel(),
        ids_crc32c=ops.crc32c(changed.ids.sort().values.cpu()) if split else 0,
        group=NO_GROUP,
        number=number,
        counters=tables.index.tables[table].tolist(),
        optimizer_steps=optimizer_steps(tables, table) if optimized else 0,
        rows=[],
        counted=0 if counters is None else int(tables.index.tables[counters, Table.SIZE]),
        sketch_width=0 if cells is None else cells.shape[1],
        removed_ids=changed.removed.numel(),
    )
    described = described_table(
        tables.config,
        table,
        saved,
        embedding_dim=part.embedding_dim,
        dtype=part.dtype,
        optimized=optimized,
        seeds=tables.index.meta[:, 0],
        hyper=tables.rows.hyper,
        clock=tables.index.clock,
        now=next_now(tables),
    )
    return LoggedPart(part.name, described)


def changed_records(
    part: TablePart,
    number: int,
    changed: ChangedIds,
    *,
    state: bool,
    scores: Sequence[str],
    form: LogRows | None = None,
) -> Iterator[Pieces]:
    """Make records of changed rows and removed ids. Rows are read when they are written.

    Args:
        part: part of a model, on this rank.
        number: number of the part in the batch.
        changed: its changes.
        state: whether the records have optimizer state.
        scores: names of the scores in the records.
        form: form of the rows; None: that of the table.
    """
    yield from _row_records(part, number, changed, state, scores, form)
    if changed.removed.numel() > 0:
        yield Pieces.of(ERASE, number, of_tensors({ID: changed.removed.cpu()}))


def _row_records(
    part: TablePart,
    number: int,
    changed: ChangedIds,
    state: bool,
    scores: Sequence[str],
    form: LogRows | None,
) -> Iterator[Pieces]:
    tables, table = part.group.tables, part.table
    split = len(part.columns) < part.embedding_dim
    # ranks with other columns of the ids must write them in the same order; else rows are read in
    # memory order
    order = torch.argsort(changed.ids if split else changed.handles)

    def read(places: Tensor) -> Callable[[], Sequence[Tensor]]:
        def make() -> Sequence[Tensor]:
            some = ChangedIds(changed.ids[places], changed.handles[places], places[:0])
            return of_tensors(tensors_of(some))

        return make

    def tensors_of(some: ChangedIds) -> dict[str, Tensor]:
        rows = copy_rows(tables, table, some, state=state, scores=scores)
        return tensors_of_rows(in_form(part.name, rows, form), form)

    none = ChangedIds(changed.ids[:0], changed.handles[:0], changed.removed[:0])
    like = tensors_of(none)
    # the same number of rows in the records of all columns
    most = max(1, _RECORD_BYTES // (4 * part.embedding_dim * (len(like) - len(scores))))
    for places in order.split(most):
        if places.numel() > 0:
            yield Pieces(ROWS, number, payload_bytes(like, places.numel()), read(places))


def admission_records(part: TablePart, number: int) -> Iterator[Pieces]:
    """Make records of the ids that wait for admission. They are read when they are written.

    Args:
        part: part of a model, on this rank.
        number: number of the part in the batch.
    """
    tables = part.group.tables
    counters = tables.config.layout.counters[part.table]
    if counters is not None:
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        batches = _counted(tables, counters)
        left = int(tables.index.tables[counters, Table.SIZE])
        while True:
            size = min(left, _COUNTS_AT_ONCE)
            total = payload_bytes({ID: none, COUNT: none}, size)
            yield Pieces(COUNTS, number, total, lambda: of_tensors(next(batches)))
            left -= size
            if left == 0:
                break
    cells = sketch_cells(tables.config, tables.index.sketch, part.table)
    if cells is not None:
        yield Pieces.of(SKETCH, number, of_tensors({CELLS: cells.to("cpu", copy=True)}))


def _counted(tables: Tables, counters: int) -> Iterator[dict[str, Tensor]]:
    """Iterate over waiting ids and their counts, in batches of equal size except the last."""
    waiting = torch.empty(2, 0, dtype=torch.int64, device="cpu")
    for batch in exported(tables, counters, _COUNTS_AT_ONCE):
        # stored like handles, where 0 is an empty slot
        waiting = torch.cat([waiting, torch.stack([batch.ids, batch.handles + 1]).cpu()], 1)
        if waiting.shape[1] >= _COUNTS_AT_ONCE:
            now, waiting = waiting[:, :_COUNTS_AT_ONCE], waiting[:, _COUNTS_AT_ONCE:]
            yield {ID: now[0].contiguous(), COUNT: now[1].contiguous()}
    yield {ID: waiting[0].contiguous(), COUNT: waiting[1].contiguous()}


def combine_columns(
    ranks: Ranks,
    parts: Sequence[TablePart],
    groups: Sequence[TableGroup],
    changes: Sequence[Changes],
) -> None:
    """Give all columns of a table the same changed ids. All ranks call it together.

    An id that changed in one column shard is written in all of them, because a record has whole
    rows once the columns are combined.

    Args:
        ranks: ranks that share the model.
        parts: parts of the model, on this rank.
        groups: groups with recorded changes.
        changes: changes of these groups, which get the ids.
    """
    gathered = ranks.gather(_of_column_shards(parts, groups, changes))
    for part in parts:
        number = next((k for k, group in enumerate(groups) if group is part.group), None)
        if number is None or len(part.columns) == part.embedding_dim:
            continue
        same = [
            of
            for of_rank in gathered
            for name, slots, of in of_rank
            if (name, slots) == (part.name, part.ids)
        ]
        ids, removed = (torch.cat(of).unique() for of in zip(*same, strict=True))
        changes[number].tables[part.table] = ids_now(part, ids, removed)


def _of_column_shards(
    parts: Sequence[TablePart], groups: Sequence[TableGroup], changes: Sequence[Changes]
) -> list[tuple[str, object, tuple[Tensor, Tensor]]]:
    """List changed and removed ids of the parts that have only some columns of a table."""
    result: list[tuple[str, object, tuple[Tensor, Tensor]]] = []
    for part in parts:
        for group, of_group in zip(groups, changes, strict=True):
            if part.group is group and len(part.columns) < part.embedding_dim:
                changed = of_group.tables[part.table]
                result.append((part.name, part.ids, (changed.ids.cpu(), changed.removed.cpu())))
    return result


def ids_now(part: TablePart, ids: Tensor, removed: Tensor) -> ChangedIds:
    """Return ids that a table has as changed, and those of ``removed`` that it lacks as removed.

    Args:
        part: part of a model, on this rank.
        ids, removed: int64 [n], unique.
    """
    tables = part.group.tables
    ids, removed = ids.to(tables.device), removed.to(tables.device)
    handles = find(tables, *one_table(tables, part.table, ids)).handles
    here = handles >= 0
    gone = find(tables, *one_table(tables, part.table, removed)).handles < 0
    return ChangedIds(ids[here], handles[here], removed[gone])


__all__ = [
    "admission_records",
    "changed_records",
    "combine_columns",
    "ids_now",
    "logged_part",
]
