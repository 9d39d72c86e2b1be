"""The one way to the values of rows that ids have: reads and writes them where they lie.

Ops that look rows up or train them take the tensors of a group as they are. Whatever else reads or
writes rows by their handles does it here, so that it need not know where a row lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import BUCKET_WIDTH, BUCKET_WORDS, GENERATION_BITS, Hyper, Meta, Table
from torch_dynemb.ops.tensors import IndexTensors, RowTensors
from torch_dynemb.table.tables import Tables

_GENERATIONS = (1 << GENERATION_BITS) - 1


class RowValues(NamedTuple):
    """Copies of the rows of some ids.

    Attributes:
        weights: [n, dim], of the dtype of the table.
        state: optimizer state by name: [n] or [n, columns].
        written: bool [n]; a row that no backward and no assignment has written has the values that
            it starts with.
    """

    weights: Tensor
    state: dict[str, Tensor]
    written: Tensor


def handle_rows(handles: Tensor) -> Tensor:
    """Row numbers of handles, int64; handles must not be negative."""
    return handles >> GENERATION_BITS


def state_names(tables: Tables) -> list[str]:
    """Names of the optimizer state of a row, in the order of ``RowTensors.state``."""
    config = tables.config.optimizer
    return [] if config is None else [tensor.name for tensor in config.state]


def state_tensors(tables: Tables, slab: int) -> dict[str, Tensor]:
    """The optimizer state of a slab by name: the tensors themselves."""
    of_slab = tables.rows.state[slab :: len(tables.config.slabs)]
    return dict(zip(state_names(tables), of_slab, strict=True))


def readable(tables: Tables, table: int, ids: Tensor, handles: Tensor) -> tuple[RowTensors, Tensor]:
    """What ops that only read rows are given, such as :func:`torch_dynemb.ops.embedding_inference`.

    Args:
        tables: of the group.
        table: that the ids are of.
        ids: int64 [n].
        handles: int64 [n], of the ids; negative where an id has no row.

    Returns:
        Rows, and the handles int64 [n] with which ops find them there.
    """
    return tables.rows, handles


def read_rows(tables: Tables, table: int, ids: Tensor, handles: Tensor) -> RowValues:
    """Copies of rows; those that nobody has written yet have the values that they start with.

    Args:
        tables: of the group.
        table: that the ids are of.
        ids: int64 [n].
        handles: int64 [n], of the ids; all of rows.
    """
    slab, numbers = tables.config.slab_of(table), handle_rows(handles)
    values = RowValues(
        tables.rows.weights[slab][numbers],
        {name: tensor[numbers] for name, tensor in state_tensors(tables, slab).items()},
        tables.rows.generations[slab][numbers] == _generations(handles),
    )
    if not bool(values.written.all()):
        _write_initial_values(tables, table, ids, values)
    return values


def write_rows(
    tables: Tables,
    table: int,
    ids: Tensor,
    handles: Tensor,
    weights: Tensor,
    state: Mapping[str, Tensor],
    *,
    first_column: int = 0,
    next_row: Tensor | None = None,
) -> None:
    """Writes rows, which are then those of their ids; waits for a GPU.

    Of a row that is written for the first time, columns that are not given have no values, and
    state that is not given is that of a new row.

    Args:
        tables: of the group.
        table: that the ids are of.
        ids: int64 [n], every id once.
        handles: int64 [n], of the ids; all of rows.
        weights: [n, columns].
        state: optimizer state by name: [n, columns], or [n] or [n, 1] where a row has one value.
            State that is not of columns (such as that of 8 bits) is given as a whole.
        first_column: which column of the table the first one is.
        next_row: int64 [], the first row that had never had an owner before these ids had their
            handles, where that is known: memory beyond it is not touched in vain.
    """
    if ids.numel() == 0:
        return
    slab = tables.config.slab_of(table)
    places = _places(handles, next_row)
    tensors = state_tensors(tables, slab)
    fresh = {name: tensor for name, tensor in tensors.items() if name not in state}
    if fresh:
        _freshen_state(tables, table, places, fresh)
    columns = slice(first_column, first_column + weights.shape[1])
    _put(tables.rows.weights[slab][:, columns], places, weights)
    for name, values in state.items():
        tensor = tensors[name]
        if tensor.dim() == 1:
            _put(tensor, places, values.reshape(-1))
        elif tensor.shape[1] == values.shape[1]:
            _put(tensor, places, values)
        else:
            _put(tensor[:, first_column : first_column + values.shape[1]], places, values)
    # last: it makes the rows those of the ids
    _put(tables.rows.generations[slab], places, places.generations)


def materialize(tables: Tables) -> int:
    """Writes the rows that no backward has written yet; returns how many."""
    return int(ops.materialize_(tables.index, tables.rows))


# -- where rows lie ------------------------------------------------------------------------------


class _Places(NamedTuple):
    """Where the rows of distinct ids lie in their slab.

    Attributes:
        numbers: int64 [n], their row numbers.
        run: the same rows where they follow each other in the order of the ids, else None: what is
            copied as a whole takes a fraction of the time.
        generations: int32 [n], those of the ids.
        first_owners: whether no row has ever had an owner before these ids.
    """

    numbers: Tensor
    run: slice | None
    generations: Tensor
    first_owners: bool


def _places(handles: Tensor, next_row: Tensor | None) -> _Places:
    """The places that handles name; waits for a GPU once.

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
    """int32 [n]."""
    return (handles & _GENERATIONS).to(torch.int32)


def _put(target: Tensor, places: _Places, values: Tensor) -> None:
    """Writes rows of a tensor."""
    if places.run is not None:
        target[places.run] = values
    else:
        target.index_copy_(0, places.numbers, values.to(target.dtype))


# -- rows that nobody has written ----------------------------------------------------------------


def _freshen_state(
    tables: Tables, table: int, places: _Places, fresh: Mapping[str, Tensor]
) -> None:
    """Optimizer state of the rows that their ids have not written yet; waits for a GPU.

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
    # Memory is zeros until it is written. A row that had an owner may have been given up by
    # `compact`, or left half copied by it, so its state is not known to be.
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


def _write_initial_values(tables: Tables, table: int, ids: Tensor, values: RowValues) -> None:
    """Gives copies of rows that nobody has written the values that they start with."""
    count = ids.numel()
    local = (torch.arange(count, device=ids.device) << GENERATION_BITS) | 1
    generations = values.written.to(torch.int32)  # 0: nobody has written the row
    buckets = -(-count // BUCKET_WIDTH)
    lines = ids.new_zeros(buckets, BUCKET_WORDS)
    for column, words in ((0, ids), (BUCKET_WIDTH, local + 1)):  # 0: an empty slot
        padded = torch.nn.functional.pad(words, (0, buckets * BUCKET_WIDTH - count))
        lines[:, column : column + BUCKET_WIDTH] = padded.view(buckets, BUCKET_WIDTH)
    meta = tables.rows.meta[table : table + 1].clone()  # of an index with this table alone
    meta[:, Meta.SLAB], meta[:, Meta.REGION_BEGIN], meta[:, Meta.REGION_BUCKETS] = 0, 0, buckets
    of_table = torch.zeros_like(tables.index.tables[:1])
    of_table[:, Table.BUCKET_COUNT] = buckets
    ops.materialize_(
        IndexTensors.read_only(lines, of_table, meta),
        tables.rows._replace(
            weights=[values.weights],
            generations=[generations],
            state=list(values.state.values()),
            hyper=tables.rows.hyper[table : table + 1],
            meta=meta,
        ),
    )


__all__ = [
    "RowValues",
    "handle_rows",
    "materialize",
    "read_rows",
    "readable",
    "state_names",
    "state_tensors",
    "write_rows",
]
