"""Rows of ids: read, write and export."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import float_rows, integer
from torch_dynemb.errors import NoRoomError
from torch_dynemb.ops.columns import BUCKET_WIDTH, Slab
from torch_dynemb.policy.half_life import logarithms_of
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table.lookup import find, find_or_insert
from torch_dynemb.table.narrowing import check_narrowed
from torch_dynemb.table.removal import contains, erase
from torch_dynemb.table.row_access import handle_rows, readable, write_rows
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.scores import decay_time, eviction_scores, score_word, stored_scores
from torch_dynemb.table.tables import Tables, exported, one_table


class ExportedRows(NamedTuple):
    """A batch of a table's content.

    Attributes:
        ids: int64 [n].
        rows: float32 [n, dim].
        scores: int64 [n], the score that eviction goes by; zeros if the table stores none.
    """

    ids: Tensor
    rows: Tensor
    scores: Tensor


def read(tables: Tables, table: int, ids: Tensor) -> Tensor:
    """Read rows as :meth:`torch_dynemb.TableGroup.read` does."""
    flat, offsets, features = one_table(tables, table, ids, "read")
    dim = tables.config.tables[table].embedding_dim
    batch = ops.LookupBatch.of_rows(flat, offsets, features, dim)
    if tables.read_by_one_op:  # between two, another thread may give the ids other rows
        return ops.find_and_read(tables.index, tables.rows, batch)
    rows, handles = readable(tables, table, flat, find(tables, flat, offsets, features).handles)
    return ops.embedding_inference(rows, batch, handles)


def insert_or_assign(
    tables: Tables, table: int, ids: Tensor, rows: Tensor, *, scores: Tensor | None = None
) -> None:
    """Write rows as :meth:`torch_dynemb.TableGroup.insert_or_assign` does."""
    config = tables.config.tables[table]
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
            f"insert_or_assign: ids has the padding id {config.padding_idx}, which has no "
            "row: leave it out"
        )
    if scores is None and config.policy.custom is not None:
        scores = _unchanged_scores(tables, table, ids)
    rule = tables.config.layout.assign_rows[table : table + 1]
    slab = tables.config.slab_of(table)
    dtype, values = tables.config.slabs[slab].dtype, rows.detach()
    if values.dtype != dtype:
        check_narrowed(f"insert_or_assign: table {config.name!r}", ids, values, dtype)
        values = values.to(dtype)
    with defer_signals(), tables.changing():
        # Without policies, handles show later which ids were new. With evictions they do not.
        there = contains(tables, table, ids) if rule else None
        before = tables.index.slabs[slab].clone()
        handles = find_or_insert(tables, ids, offsets, features, rule, scores=scores)
        if ids.numel() == 0:
            return
        try:
            if bool((handles < 0).any()):
                # raises the error of a GPU's kernel, if it refused the ids
                tables.memory.end_step(tables.index, tables.rows)
                raise NoRoomError(
                    f"insert_or_assign: table {config.name!r} has no room for all ids; none "
                    "has been inserted or written: give it a larger capacity or budget, or "
                    "erase ids",
                    tables=[config.name],
                )
            next_row = before[Slab.NEXT_ROW]
            write_rows(tables, table, RowBatch(ids, values), handles, next_row=next_row)
            _forget_counts(tables, table, ids)
        except BaseException:
            new = _had_no_owner(tables, slab, handles, before) if there is None else ~there
            erase(tables, table, ids[new])
            raise


def _unchanged_scores(tables: Tables, table: int, ids: Tensor) -> Tensor | None:
    """Return custom scores that leave those of known ids as they are; new ids get 0.

    None: lookups of the table have a score of the batch, which new and known ids get.
    """
    if table in tables.host.batch_scored:
        return None
    if tables.config.tables[table].policy.combine in ("sum", "decayed_sum"):
        return torch.zeros_like(ids)
    return stored_scores(tables, table, ids, "custom").scores


def _had_no_owner(tables: Tables, slab: int, handles: Tensor, before: Tensor) -> Tensor:
    """Return which handles have a row that was free before, bool [n]; valid without evictions.

    Args:
        handles: int64 [n], current ones of ids.
        before: int64 [8], the slab's row of ``slabs`` before.
    """
    free = tables.index.free_rows[slab, : int(before[Slab.FREE_COUNT])]
    return (handle_rows(handles) >= before[Slab.NEXT_ROW]) | torch.isin(handles, free)


def _whole(ids: Tensor) -> Tensor:
    """Return the offsets of one group of all ids; made on their device, so nothing waits."""
    return torch.arange(2, device=ids.device) * ids.numel()


def _forget_counts(tables: Tables, table: int, ids: Tensor) -> None:
    """Clear the admission counts of ids, since they have a row now."""
    counters = tables.config.layout.counters[table]
    if counters is not None:
        flat, offsets, _ = one_table(tables, table, ids)
        ops.erase_(
            tables.index,
            flat,
            offsets,
            [counters],
        )


def export(
    tables: Tables,
    table: int,
    *,
    batch_size: int = 1 << 20,
    since: int | None = None,
    score: str | None = None,
) -> Iterator[ExportedRows]:
    """Export rows as :meth:`torch_dynemb.TableGroup.export` does."""
    batch_size = integer("export: batch_size", batch_size, least=BUCKET_WIDTH)
    dim = tables.config.tables[table].embedding_dim
    since = None if since is None else integer("export: since", since, what="int or None")
    word = 0 if since is None else score_word(tables, table, score, "export")
    if since is not None and tables.config.layout.score_words[word] == "decayed":
        count = torch.tensor([max(since, 0)], dtype=torch.float64, device="cpu")
        since = int(logarithms_of(count, decay_time(tables, table)))
    for batch in exported(tables, table, batch_size):
        if since is not None:
            chosen = batch.scores[:, word] >= since
            batch = batch.chosen(chosen)
            if batch.ids.numel() == 0:
                continue
        source, handles = readable(tables, table, batch.ids, batch.handles)
        bag = torch.tensor([0, batch.ids.numel()], device=tables.device)
        wanted = ops.LookupBatch.of_rows(batch.ids, bag, [table], dim)
        rows = ops.embedding_inference(source, wanted, handles)
        yield ExportedRows(batch.ids, rows, eviction_scores(tables, table, batch))


__all__ = ["ExportedRows", "export", "insert_or_assign", "read"]
