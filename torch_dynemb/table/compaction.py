"""Compaction of a group: gives back the memory of removed ids.

A slab before and after; ``.`` is a free row, ``end`` the number of used rows::

    before    A . B . . C D        rows C and D are at or beyond end = 4
    after     A C B D              memory beyond ``end`` is given back

Steps for a slab:

1. Choose free rows below ``end`` for the ids with rows from ``end`` on.
2. Copy their rows. Free rows have no owner, so an interrupt has no effect so far.
3. With signals deferred: empty the free list, give the ids their new rows, and set the new end.

Invariants:

* Two ids never share a row: a row leaves the free list before an id gets it.
* Handles from before are stale afterwards: later rows get a newer generation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import GENERATION_BITS, GENERATION_MASK, Slab
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table.lookup import find
from torch_dynemb.table.tables import Tables, exported, one_table, used_bytes

_ROWS_AT_ONCE = 1 << 16


class _Move(NamedTuple):
    """Ids of a table that get another row.

    Attributes:
        table: its number.
        ids: int64 [n].
        old, new: int64 [n], handles.
        written: bool [n], whether a backward has written the row.
    """

    table: int
    ids: Tensor
    old: Tensor
    new: Tensor
    written: Tensor


def compact(tables: Tables) -> int:
    """Compact the tables as :meth:`torch_dynemb.TableGroup.compact` does."""
    tables.check_own()
    tables.wait_until_read()
    tables.memory.wait_beside()
    with tables.changing(moves_rows=True):
        before = used_bytes(tables)["total"]
        for slab in range(len(tables.config.slabs)):
            if tables.stored(slab) is None or _has_no_ids(tables, slab):
                _compact_rows(tables, slab)
        for table in range(tables.index.tables.shape[0]):
            ops.shrink_(tables.index, table, 0)
        with defer_signals():
            tables.release_memory()
        return before - used_bytes(tables)["total"]


def _has_no_ids(tables: Tables, slab: int) -> bool:
    row = tables.index.slabs[slab]
    return int(row[Slab.FREE_COUNT]) == int(row[Slab.NEXT_ROW])


def _compact_rows(tables: Tables, slab: int) -> None:
    """Move rows from the end to free rows, in the order of the index."""
    used, count = (int(tables.index.slabs[slab, c]) for c in (Slab.NEXT_ROW, Slab.FREE_COUNT))
    if count == 0:
        return
    end = used - count
    free = tables.index.free_rows[slab, :count].clone()
    moves, newest = _moves(tables, slab, end, free)
    # Newer than any handle in use, and not 0. Also newer than generations that an earlier compact()
    # left beyond the last row: else a new row would count as written.
    newest = max(newest, int(tables.index.slabs[slab, Slab.GENERATION]))
    generation = newest % GENERATION_MASK + 1
    after = tables.index.slabs[slab].clone()
    for column, value in (
        (Slab.NEXT_ROW, end),
        (Slab.FREE_COUNT, 0),
        (Slab.COMMITTED_ROWS, end),
        (Slab.GENERATION, generation),
    ):
        after[column] = value
    # free rows have no owner, so their values do not matter: an interrupt has no effect up to here
    for move in moves:
        _copy_rows(tables, slab, move)
    with defer_signals():
        try:
            # A row leaves the free list before an id gets it, so two ids never share one.
            tables.index.slabs[slab, Slab.FREE_COUNT] = 0
            for move in moves:
                _give_rows(tables, slab, move)
            if tables.stored(slab) is None:
                tables.rows.generations[slab][end:used] = generation
            tables.index.slabs[slab].copy_(after)
        except BaseException:
            if int(tables.index.slabs[slab, Slab.NEXT_ROW]) == used:
                _find_free_rows(tables, slab, used, moves, free, generation % GENERATION_MASK + 1)
            raise


def _moves(tables: Tables, slab: int, end: int, free: Tensor) -> tuple[list[_Move], int]:
    """Return ids with rows from ``end`` on, with free rows for them, and the newest generation."""
    generations = tables.rows.generations[slab]
    places = free[(free >> GENERATION_BITS) < end].sort().values
    newest = int((free & GENERATION_MASK).max())
    moves = []
    taken = 0
    for table in range(len(tables.config.tables)):
        if tables.config.slab_of(table) != slab:
            continue
        for batch in exported(tables, table, 1 << 20):
            newest = max(newest, int((batch.handles & GENERATION_MASK).max()))
            beyond = (batch.handles >> GENERATION_BITS) >= end
            ids, old = batch.ids[beyond], batch.handles[beyond]
            new = places[taken : taken + ids.shape[0]].contiguous()
            taken += ids.shape[0]
            stored = generations[old >> GENERATION_BITS]
            written = stored == (old & GENERATION_MASK).to(torch.int32)
            moves.append(_Move(table, ids, old, new, written))
    return moves, newest


def _copy_rows(tables: Tables, slab: int, move: _Move) -> None:
    rows = tables.rows
    tensors = [rows.weights[slab], *rows.state[slab :: len(rows.weights)]]
    tensors += rows.dirty_bits[slab : slab + 1]
    sources = (move.old[move.written] >> GENERATION_BITS).split(_ROWS_AT_ONCE)
    targets = (move.new[move.written] >> GENERATION_BITS).split(_ROWS_AT_ONCE)
    for source, target in zip(sources, targets, strict=True):
        for tensor in tensors:
            tensor[target] = tensor[source]


def _give_rows(tables: Tables, slab: int, move: _Move) -> None:
    new = move.new[move.written]
    tables.rows.generations[slab][new >> GENERATION_BITS] = (new & GENERATION_MASK).to(torch.int32)
    offsets = torch.tensor([0, move.ids.shape[0]], device=tables.device)
    ops.set_handles_(tables.index, move.ids, offsets, [move.table], move.new)


def _find_free_rows(
    tables: Tables, slab: int, used: int, moves: list[_Move], free: Tensor, generation: int
) -> None:
    """Rebuild the free list after a failure; its rows get a new generation."""
    unused = torch.zeros(used, dtype=torch.bool, device=tables.device)
    unused[free >> GENERATION_BITS] = True
    for move in moves:
        now = find(tables, *one_table(tables, move.table, move.ids)).handles
        unused[move.old >> GENERATION_BITS] = True
        unused[now >> GENERATION_BITS] = False
    rows = unused.nonzero()[:, 0]
    tables.index.free_rows[slab, : rows.shape[0]] = (rows << GENERATION_BITS) | generation
    tables.index.slabs[slab, Slab.FREE_COUNT] = rows.shape[0]
    tables.bind_memory()


__all__ = ["compact"]
