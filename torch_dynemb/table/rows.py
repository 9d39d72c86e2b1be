"""Rows of ids: reading, writing, exporting them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import float_rows, integer
from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS, Hyper, Meta
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
    if torch.unique(ids).numel() != ids.numel():
        raise ValueError("insert_or_assign: ids has repeated ids, expected every id once")
    if config.padding_idx is not None and bool((ids == config.padding_idx).any()):
        raise ValueError(
            f"insert_or_assign: ids has the padding id {config.padding_idx}, which has no row"
        )
    there = contains(tables, table, ids)
    rule = tables.config.layout.assign_rows[table : table + 1]
    values = rows.detach().to(tables.rows.weights[int(tables.index.meta[table, Meta.SLAB])].dtype)
    with held_back():
        handles = find_or_insert(tables, ids, offsets, features, rule)
        try:
            if bool((handles < 0).any()):
                tables.memory.end_step(
                    tables.index, tables.rows
                )  # if a GPU has refused the ids, it says why here
                raise RuntimeError(
                    f"insert_or_assign: table {config.name!r} has no room for all ids; none "
                    "has been inserted or written"
                )
            _write_rows(tables, table, handles, values)
            _forget_counts(tables, table, ids)
        except BaseException:
            erase(tables, table, ids[~there])
            raise


def _write_rows(tables: Tables, table: int, handles: Tensor, values: Tensor) -> None:
    slab = int(tables.index.meta[table, Meta.SLAB])
    written = handle_rows(handles)
    generations = (handles & ((1 << GENERATION_BITS) - 1)).to(torch.int32)
    fresh = written[tables.rows.generations[slab][written] != generations]
    for state in tables.rows.state[slab :: len(tables.config.slabs)]:
        state[fresh] = 0
    if tables.rows.state:
        initial = tables.rows.hyper[table, Hyper.INITIAL_STATE]
        tables.rows.state[slab][fresh] = initial.to(tables.rows.state[slab].dtype)
    tables.rows.weights[slab][written] = values
    tables.rows.generations[slab][written] = generations


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
