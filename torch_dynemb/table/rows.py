"""Rows of ids: reading, writing, exporting them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import float_rows, integer
from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS, Hyper, Slab
from torch_dynemb.process.interrupts import held_back
from torch_dynemb.table.lookup import find, find_or_insert
from torch_dynemb.table.removal import contains, erase
from torch_dynemb.table.scores import eviction_scores, score_word
from torch_dynemb.table.tables import Tables, exported, one_table


class ExportedRows(NamedTuple):
    """A batch of a table's content.

    Attributes:
        ids: int64 [n].
        rows: float32 [n, dim].
        scores: int64 [n], by which the table evicts; zeros if it keeps none.
    """

    ids: Tensor
    rows: Tensor
    scores: Tensor


def read(tables: Tables, table: int, ids: Tensor) -> Tensor:
    """See :meth:`torch_dynemb.TableGroup.read`."""
    flat, offsets, features = one_table(tables, table, ids, "read")
    return ops.embedding_inference(
        tables.rows,
        flat,
        find(tables, flat, offsets, features).handles,
        offsets,
        feature_tables=features,
        dim=tables.config.tables[table].embedding_dim,
    )


def insert_or_assign(tables: Tables, table: int, ids: Tensor, rows: Tensor) -> None:
    """See :meth:`torch_dynemb.TableGroup.insert_or_assign`."""
    config = tables.config.table(table, "insert_or_assign")
    ids, offsets, features = one_table(tables, table, ids, "insert_or_assign")
    rows = float_rows("insert_or_assign: rows", rows, tables.device)
    if tuple(rows.shape) != (ids.numel(), config.embedding_dim):
        raise ValueError(
            f"insert_or_assign: rows has shape {tuple(rows.shape)}, expected "
            f"({ids.numel()}, {config.embedding_dim})"
        )
    if ops.unique_ids(ids, _whole(ids)).ids.numel() != ids.numel():
        raise ValueError("insert_or_assign: ids has repeated ids, expected every id once")
    if config.padding_idx is not None and bool((ids == config.padding_idx).any()):
        raise ValueError(
            f"insert_or_assign: ids has the padding id {config.padding_idx}, which has no row"
        )
    rule = tables.config.layout.assign_rows[table : table + 1]
    # Handles tell later who was new, unless an id may get the row of another one that is evicted.
    there = contains(tables, table, ids) if rule else None
    slab = tables.config.slab_of(table)
    values = rows.detach().to(tables.rows.weights[slab].dtype)
    before = tables.index.slabs[slab].clone()
    with held_back():
        handles = find_or_insert(tables, ids, offsets, features, rule)
        if ids.numel() == 0:
            return
        try:
            places = _places(handles, before)
            if places is None:
                tables.memory.end_step(
                    tables.index, tables.rows
                )  # if a GPU has refused the ids, it says why here
                raise RuntimeError(
                    f"insert_or_assign: table {config.name!r} has no room for all ids; none "
                    "has been inserted or written"
                )
            _write_rows(tables, table, places, values)
            _forget_counts(tables, table, ids)
        except BaseException:
            new = _had_no_owner(tables, slab, handles, before) if there is None else ~there
            erase(tables, table, ids[new])
            raise


def _had_no_owner(tables: Tables, slab: int, handles: Tensor, before: Tensor) -> Tensor:
    """bool [n], of which handles nobody had the row, where nobody was evicted.

    Args:
        handles: int64 [n], which ids have now.
        before: int64 [8], the slab's row of ``slabs`` before.
    """
    free = tables.index.free_rows[slab, : int(before[Slab.FREE_COUNT])]
    return (handle_rows(handles) >= before[Slab.NEXT_ROW]) | torch.isin(handles, free)


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


def _places(handles: Tensor, before: Tensor) -> _Places | None:
    """The places that handles name; None: some id has no row. Waits for a GPU once.

    Args:
        handles: int64 [n], n at least 1.
        before: int64 [8], the slab's row of ``slabs`` before ids got these handles.
    """
    numbers = handle_rows(handles)
    follows = (numbers[1:] - numbers[:-1] == 1).all()
    used = before[Slab.NEXT_ROW]
    facts = torch.stack([handles.amin(), numbers[0], used, follows.to(torch.int64)])
    least, first, used_before, one_run = facts.tolist()
    if least < 0:
        return None
    run = slice(first, first + handles.numel()) if one_run else None
    generations = (handles & ((1 << GENERATION_BITS) - 1)).to(torch.int32)
    return _Places(numbers, run, generations, run is not None and first >= used_before)


def _write_rows(tables: Tables, table: int, places: _Places, values: Tensor) -> None:
    slab = tables.config.slab_of(table)
    if tables.rows.state:
        _freshen_state(tables, table, places)
    for tensor, written in (
        (tables.rows.weights[slab], values),
        (tables.rows.generations[slab], places.generations),  # last: it makes the row the id's
    ):
        if places.run is not None:
            tensor[places.run] = written
        else:
            tensor.index_copy_(0, places.numbers, written)


def _freshen_state(tables: Tables, table: int, places: _Places) -> None:
    """Optimizer state of the rows that their ids have not written yet; waits for a GPU."""
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
    for k, state in enumerate(tables.rows.state[slab :: len(tables.config.slabs)]):
        value = initial_state if k == 0 else 0.0
        if value == 0.0 and zeros:
            continue
        if run is not None:
            state[run] = value
        else:
            state.index_fill_(0, numbers, value)


def _whole(ids: Tensor) -> Tensor:
    """The offsets of one group of all ids; made on their device, so that nothing waits."""
    return torch.arange(2, device=ids.device) * ids.numel()


def _forget_counts(tables: Tables, table: int, ids: Tensor) -> None:
    """Ids that have a row wait for admission no longer."""
    counters = tables.config.layout.counters[table]
    if counters is not None:
        flat, offsets, _ = one_table(tables, table, ids)
        ops.erase_(
            tables.index,
            flat,
            offsets,
            [counters],
        )


def materialize(tables: Tables) -> int:
    """See :meth:`torch_dynemb.TableGroup.materialize`."""
    return int(ops.materialize_(tables.index, tables.rows))


def export(
    tables: Tables,
    table: int,
    *,
    batch_size: int = 1 << 20,
    since: int | None = None,
    score: str | None = None,
) -> Iterator[ExportedRows]:
    """See :meth:`torch_dynemb.TableGroup.export`."""
    batch_size = integer("export: batch_size", batch_size, least=BUCKET_WIDTH)
    dim = tables.config.table(table, "export").embedding_dim
    since = None if since is None else integer("export: since", since, what="int or None")
    word = 0 if since is None else score_word(tables, table, score, "export")
    for batch in exported(tables, table, batch_size):
        if since is not None:
            chosen = batch.scores[:, word] >= since
            batch = batch.chosen(chosen)
            if batch.ids.numel() == 0:
                continue
        rows = ops.embedding_inference(
            tables.rows,
            batch.ids,
            batch.handles,
            torch.tensor([0, batch.ids.numel()], device=tables.device),
            feature_tables=[table],
            dim=dim,
        )
        yield ExportedRows(batch.ids, rows, eviction_scores(tables, table, batch))


def handle_rows(handles: Tensor) -> Tensor:
    """Row numbers of handles, int64; handles must not be negative."""
    return handles >> GENERATION_BITS


__all__ = ["ExportedRows", "export", "handle_rows", "insert_or_assign", "materialize", "read"]
