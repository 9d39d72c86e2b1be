"""Reads and writes of rows by their handles, in memory or in a store.

Ops that look rows up or train them take the tensors of a group directly. All other code reads and
writes rows here, so it does not depend on where a row is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    BUCKET_WORDS,
    GENERATION_BITS,
    GENERATION_MASK,
    CopyOnWrite,
    Hyper,
    Meta,
    Slab,
    Table,
)
from torch_dynemb.ops.row_copies import put_rows_
from torch_dynemb.ops.tensors import IndexTensors, RowTensors
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.storage.tiers.tiers import Records, Tiers
from torch_dynemb.table.records import packed, record_bytes, state_of, weights_of
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.tables import Tables

DIRTY = 255  # the dirty bits of a written row, one for every reader
_PIECE_BYTES = 8 << 20  # of records in one read from a store


class ReadsRecords(Protocol):
    """A store, or its pinned rows."""

    def read(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        """Read rows of ids; see :meth:`torch_dynemb.storage.tiers.tiers.Tiers.read`."""


def handle_rows(handles: Tensor) -> Tensor:
    """Return the row numbers of handles, int64; handles must not be negative."""
    return handles >> GENERATION_BITS


def first_generation(tables: Tables, slab: int) -> int:
    """Return the generation of handles of rows without an earlier owner; waits for a GPU.

    Args:
        tables: of the group.
        slab: of the rows.
    """
    return (int(tables.index.slabs[slab, Slab.GENERATION]) % GENERATION_MASK) + 1


def state_names(tables: Tables) -> list[str]:
    """Return the names of the optimizer state of a row, in the order of ``RowTensors.state``."""
    config = tables.config.optimizer
    return [] if config is None else [tensor.name for tensor in config.state]


def state_tensors(tables: Tables, slab: int) -> dict[str, Tensor]:
    """Return the optimizer state of a slab by name, [rows, columns] each, without a copy."""
    of_slab = tables.rows.state[slab :: len(tables.config.slabs)]
    by_row = (tensor if tensor.dim() == 2 else tensor[:, None] for tensor in of_slab)
    return dict(zip(state_names(tables), by_row, strict=True))


def as_kept(optimizer: OptimizerConfig | None, state: Mapping[str, Tensor]) -> list[Tensor]:
    """Return state in the order and shapes of ``RowTensors.state``.

    Args:
        optimizer: of the group.
        state: all optimizer state by name, [n, columns].
    """
    tensors = () if optimizer is None else optimizer.state
    return [state[of.name][:, 0] if of.per_row else state[of.name] for of in tensors]


def readable(tables: Tables, table: int, ids: Tensor, handles: Tensor) -> tuple[RowTensors, Tensor]:
    """Return rows and handles for ops that only read rows, such as ``embedding_inference``.

    Rows in memory are used in place; rows in a store are copied.

    Args:
        tables: of the group.
        table: of the ids.
        ids: int64 [n].
        handles: int64 [n], of the ids; negative if an id has no row.

    Returns:
        Rows, and the handles int64 [n] of the ids in them.
    """
    slab = tables.config.slab_of(table)
    stored = tables.stored(slab)
    if stored is None:
        return tables.rows, handles
    there = (handles >= 0).nonzero()[:, 0]
    of_rows = handles[there]
    of = tables.config.slabs[slab]
    weights = torch.empty(max(1, there.numel()), of.dim, dtype=of.dtype, device=ids.device)
    generations = torch.zeros(weights.shape[0], dtype=torch.int32, device=ids.device)
    for piece in _pieces(tables, slab, there.numel()):
        records, found = stored.read(slab, table, ids[there[piece]], of_rows[piece])
        weights[piece] = weights_of(tables.config, slab, records)
        generations[piece] = _generations(of_rows[piece]) * found
    local = torch.arange(there.numel(), device=ids.device) << GENERATION_BITS
    local = handles.index_copy(0, there, local | (of_rows & GENERATION_MASK))
    rows = tables.rows._replace(
        weights=_with(tables.rows.weights, slab, weights),
        generations=_with(tables.rows.generations, slab, generations),
    )
    return rows, local


def read_rows(
    tables: Tables, table: int, ids: Tensor, handles: Tensor, *, state: bool = True
) -> RowBatch:
    """Copy rows with their state; unwritten rows have their initial values.

    Args:
        tables: of the group.
        table: of the ids.
        ids: int64 [n].
        handles: int64 [n], of the ids; all have a row.
        state: whether state is read, too.
    """
    slab, numbers = tables.config.slab_of(table), handle_rows(handles)
    stored = tables.stored(slab)
    if stored is not None:
        return read_records(tables, stored, table, ids, handles, state=state)
    tensors = state_tensors(tables, slab) if state else {}
    batch = RowBatch(
        ids,
        tables.rows.weights[slab][numbers],
        {name: tensor[numbers] for name, tensor in tensors.items()},
    )
    written = tables.rows.generations[slab][numbers] == _generations(handles)
    write_initial_values(tables, table, batch, written)
    return batch


def read_records(
    tables: Tables,
    store: ReadsRecords,
    table: int,
    ids: Tensor,
    handles: Tensor,
    *,
    state: bool = True,
) -> RowBatch:
    """Copy rows from a store, like :func:`read_rows`.

    Args:
        tables: of the group.
        store: of the rows.
        table: of the ids.
        ids: int64 [n].
        handles: int64 [n], of the ids; all have a row.
        state: whether state is read, too.
    """
    config, slab = tables.config, tables.config.slab_of(table)
    count, tensors = ids.numel(), state_tensors(tables, slab) if state else {}
    batch = RowBatch(
        ids,
        tables.rows.weights[slab].new_empty(count, config.slabs[slab].dim),
        {name: tensor.new_empty(count, tensor.shape[1]) for name, tensor in tensors.items()},
    )
    written = torch.empty(count, dtype=torch.bool, device=ids.device)
    for piece in _pieces(tables, slab, count):
        records, written[piece] = store.read(slab, table, ids[piece], handles[piece])
        batch.rows[piece] = weights_of(config, slab, records)
        for name, tensor in (state_of(config, slab, records) if state else {}).items():
            batch.state[name][piece] = tensor
    write_initial_values(tables, table, batch, written)
    return batch


def write_initial_values(tables: Tables, table: int, batch: RowBatch, written: Tensor) -> None:
    """Write the initial values of unwritten rows into copies of rows.

    Args:
        tables: of the group.
        table: of the ids.
        batch: changed in place.
        written: bool [n], whether a backward or an assignment has written the row.
    """
    if not bool(written.all()):
        _write_initial_values(tables, table, batch, written)


def write_rows(
    tables: Tables,
    table: int,
    batch: RowBatch,
    handles: Tensor,
    *,
    next_row: Tensor | None = None,
) -> None:
    """Write rows of ids with their state; waits for a GPU.

    In a row that is written for the first time, missing columns stay undefined, and missing state
    is that of a new row.

    Args:
        tables: of the group.
        table: of the ids.
        batch: ids without duplicates, and some columns of their rows. State without columns (such
            as 8-bit state) is given as a whole. Scores are not written.
        handles: int64 [n], of the ids; all have a row.
        next_row: int64 [], the first row without an owner before these ids got their handles, if
            known: state of new rows is not zeroed a second time.

    Raises:
        RuntimeError: rows are on a disk that is full, and nothing has been written; or the disk
            fails.
    """
    if batch.ids.numel() == 0:
        return
    slab = tables.config.slab_of(table)
    stored = tables.stored(slab)
    if stored is not None:
        _write_stored(tables, stored, table, batch, handles)
        return
    places = _places(handles, next_row)
    tensors = state_tensors(tables, slab)
    for words in tables.rows.copy_on_write[slab : slab + 1]:
        if int(words[CopyOnWrite.ACTIVE]):
            of_slab = tables.rows.state[slab :: len(tables.config.slabs)]
            ops.copy_before_write_(tables.rows.weights[slab], of_slab, words, places.numbers)
    fresh = {name: tensor for name, tensor in tensors.items() if name not in batch.state}
    if fresh:
        _freshen_state(tables, table, places, fresh)
    columns = slice(batch.columns.start, batch.columns.stop)
    _put(tables.rows.weights[slab][:, columns], places, batch.rows)
    for name, values in batch.state.items():
        _put(_columns_of(tensors[name], values, batch.first_column), places, values)
    # last: from here on the ids own the rows
    _put(tables.rows.generations[slab], places, places.generations)
    for dirty in tables.rows.dirty_bits[slab : slab + 1]:
        dirty[places.numbers if places.run is None else places.run] = DIRTY


def materialize(tables: Tables) -> int:
    """Write the rows that no backward has written yet; return how many.

    Rows in a store are skipped: a read returns their initial values.
    """
    return int(ops.materialize_(tables.index, tables.rows))


# -- rows in a store -----------------------------------------------------------------------------


def _pieces(tables: Tables, slab: int, count: int) -> Iterator[slice]:
    """Yield ranges of rows that fit into one read from a store."""
    step = max(1, _PIECE_BYTES // record_bytes(tables.config, slab))
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def _with(tensors: list[Tensor], number: int, tensor: Tensor) -> list[Tensor]:
    return [*tensors[:number], tensor, *tensors[number + 1 :]]


def _write_stored(
    tables: Tables, stored: Tiers, table: int, batch: RowBatch, handles: Tensor
) -> None:
    """Write all rows in one call, so a full disk has changed nothing."""
    config, slab, whole = tables.config, tables.config.slab_of(table), batch
    tensors = state_tensors(tables, slab)
    given = all(
        name in batch.state and batch.state[name].shape[1] == tensor.shape[1]
        for name, tensor in tensors.items()
    )
    if not given or len(batch.columns) < config.slabs[slab].dim:
        whole = read_rows(tables, table, batch.ids, handles)
        whole.rows[:, batch.columns.start : batch.columns.stop] = batch.rows
        for name, values in batch.state.items():
            _columns_of(whole.state[name], values, batch.first_column)[:] = values
    own = whole.rows.to(config.slabs[slab].dtype)
    state = {name: whole.state[name].to(tensor.dtype) for name, tensor in tensors.items()}
    stored.write(slab, table, batch.ids, handles, packed(config, slab, own, state))


# -- places of rows ------------------------------------------------------------------------------


class _Places(NamedTuple):
    """Places of the rows of distinct ids in their slab.

    Attributes:
        numbers: int64 [n], their row numbers.
        run: the rows as a slice if they are consecutive in the order of the ids, else None. A slice
            is copied in a fraction of the time.
        generations: int32 [n], those of the ids.
        first_owners: whether these ids are the first owners of their rows.
    """

    numbers: Tensor
    run: slice | None
    generations: Tensor
    first_owners: bool


def _places(handles: Tensor, next_row: Tensor | None) -> _Places:
    """Return the places of handles; waits for a GPU once.

    Args:
        handles: int64 [n], n at least 1.
        next_row: see :func:`write_rows`.
    """
    numbers = handle_rows(handles)
    follows = (numbers[1:] - numbers[:-1] == 1).all()
    used = numbers.amax() + 1 if next_row is None else next_row
    first, used_before, one_run = torch.stack([numbers[0], used, follows.to(torch.int64)]).tolist()
    run = slice(first, first + handles.numel()) if one_run else None
    return _Places(numbers, run, _generations(handles), run is not None and first >= used_before)


def _generations(handles: Tensor) -> Tensor:
    """Return the generations of handles, int32 [n]."""
    return (handles & GENERATION_MASK).to(torch.int32)


def _columns_of(tensor: Tensor, values: Tensor, first_column: int) -> Tensor:
    """Return the part of a state tensor that ``values`` are for: some columns, or all."""
    if tensor.shape[1] == values.shape[1]:
        return tensor
    return tensor[:, first_column : first_column + values.shape[1]]


def _put(target: Tensor, places: _Places, values: Tensor) -> None:
    """Write rows of a tensor."""
    if places.run is not None:
        put_rows_(target[places.run], values)
    else:
        target.index_copy_(0, places.numbers, values.to(target.dtype))


# -- unwritten rows ------------------------------------------------------------------------------


def _freshen_state(
    tables: Tables, table: int, places: _Places, fresh: Mapping[str, Tensor]
) -> None:
    """Reset the optimizer state of rows that their ids have not written yet; waits for a GPU.

    Args:
        fresh: tensors of state by name.
    """
    slab = tables.config.slab_of(table)
    run, generations = places.run, tables.rows.generations[slab]
    stored = generations[places.numbers] if run is None else generations[run]
    unwritten = stored != places.generations
    initial = tables.rows.hyper[table, Hyper.INITIAL_STATE]
    facts = torch.stack([unwritten.sum().to(initial.dtype), (stored == 0).all() + 0.0, initial])
    count, never_written, initial_state = facts.tolist()
    if count == 0:
        return
    if count < places.numbers.numel():
        run = None
    numbers = places.numbers[unwritten] if run is None else places.numbers
    # Memory is zero until it is written. A row that had an owner may be one that `compact` freed
    # or copied in part, so its state may be anything.
    zeros = places.first_owners and never_written
    first, *_ = state_names(tables)
    for name, tensor in fresh.items():
        value = initial_state if name == first else 0.0
        if value == 0.0 and zeros:
            continue
        if run is not None:
            tensor[run] = value
        else:
            tensor.index_fill_(0, numbers, value)


def _write_initial_values(tables: Tables, table: int, batch: RowBatch, written: Tensor) -> None:
    ids, count = batch.ids, batch.ids.numel()
    local = (torch.arange(count, device=ids.device) << GENERATION_BITS) | 1
    generations = written.to(torch.int32)  # 0: an unwritten row
    buckets = -(-count // BUCKET_WIDTH)
    lines = ids.new_zeros(buckets, BUCKET_WORDS)
    for column, words in ((0, ids), (BUCKET_WIDTH, local + 1)):  # 0: an empty slot
        padded = torch.nn.functional.pad(words, (0, buckets * BUCKET_WIDTH - count))
        lines[:, column : column + BUCKET_WIDTH] = padded.view(buckets, BUCKET_WIDTH)
    meta = tables.rows.meta[table : table + 1].clone()  # of an index with this table alone
    meta[:, [Meta.SLAB, Meta.REGION_BEGIN, Meta.TIERED]] = 0
    meta[:, Meta.REGION_BUCKETS] = buckets
    of_table = torch.zeros_like(tables.index.tables[:1])
    of_table[:, Table.BUCKET_COUNT] = buckets
    ops.materialize_(
        IndexTensors.read_only(lines, of_table, meta),
        tables.rows._replace(
            weights=[batch.rows],
            generations=[generations],
            state=as_kept(tables.config.optimizer, batch.state) if batch.state else [],
            dirty_bits=[],
            copy_on_write=[],
            hyper=tables.rows.hyper[table : table + 1],
            meta=meta,
        ),
    )


__all__ = [
    "DIRTY",
    "ReadsRecords",
    "as_kept",
    "first_generation",
    "handle_rows",
    "materialize",
    "read_records",
    "read_rows",
    "readable",
    "state_names",
    "state_tensors",
    "write_initial_values",
    "write_rows",
]
