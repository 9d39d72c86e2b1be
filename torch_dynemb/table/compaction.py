"""Gives memory back that removed ids have left behind."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import GENERATION_BITS, Slab
from torch_dynemb.process.forked import check_own
from torch_dynemb.process.interrupts import held_back
from torch_dynemb.table.group_parts import GroupParts, exported

_ROWS_AT_ONCE = 1 << 16
_GENERATIONS = (1 << GENERATION_BITS) - 1


class _Move(NamedTuple):
    """Ids of a table whose rows move.

    Attributes:
        ids: int64 [n].
        old, new: int64 [n], handles.
        written: bool [n], whether a backward has written the row.
    """

    table: int
    ids: Tensor
    old: Tensor
    new: Tensor
    written: Tensor


class Compaction(GroupParts):
    """The part of a table group that gives memory back."""

    def compact(self) -> int:
        """Moves rows together, shrinks the indexes, and gives the memory beyond them back.

        Between training steps only: handles of a forward whose backward is still to come become
        stale, and their gradients are dropped and counted. Tensors keep shape and address.

        Interrupted, it has been done for some of the tables: all ids keep their rows.

        Returns:
            By how many bytes :meth:`memory` has shrunk.
        """
        check_own(self)
        before = self.memory()["total"]
        for slab in range(len(self.slab_configs)):
            self._compact_rows(slab)
        for table in range(self.tables.shape[0]):
            ops.shrink_(self.buckets, self.scores, self.tables, self.meta, table, 0)
        with held_back():
            self.release_memory()
        return before - self.memory()["total"]

    def _compact_rows(self, slab: int) -> None:
        """Rows at the end move to where ids were removed; the order follows the index."""
        used, count = (int(self.slabs[slab, c]) for c in (Slab.NEXT_ROW, Slab.FREE_COUNT))
        if count == 0:
            return
        end = used - count
        free = self.free_rows[slab, :count].clone()
        moves, newest = self._moves(slab, end, free)
        # handles that are still out there are older, and what comes next is newer, and not 0
        generation = newest % _GENERATIONS + 1
        after = self.slabs[slab].clone()
        for column, value in (
            (Slab.NEXT_ROW, end),
            (Slab.FREE_COUNT, 0),
            (Slab.COMMITTED_ROWS, end),
            (Slab.GENERATION, generation),
        ):
            after[column] = value
        # free rows belong to nobody, whatever their values: an interrupt has no effect up to here
        for move in moves:
            self._copy_rows(slab, move)
        with held_back():
            try:
                # A row leaves the free list before an id gets it. So no two ids ever share one.
                self.slabs[slab, Slab.FREE_COUNT] = 0
                for move in moves:
                    self._give_rows(slab, move)
                self.generations[slab][end:used] = generation
                self.slabs[slab].copy_(after)
            except BaseException:
                if int(self.slabs[slab, Slab.NEXT_ROW]) == used:
                    self._find_free_rows(slab, used, moves, free, generation % _GENERATIONS + 1)
                raise

    def _moves(self, slab: int, end: int, free: Tensor) -> tuple[list[_Move], int]:
        """The ids with rows from ``end`` on and free places for them; the newest generation."""
        generations = self.generations[slab]
        places = free[(free >> GENERATION_BITS) < end].sort().values
        newest = int((free & _GENERATIONS).max())
        moves = []
        taken = 0
        for table in range(len(self.tables_config)):
            if self.slab_of(table) != slab:
                continue
            for batch in exported(self, table, 1 << 20):
                newest = max(newest, int((batch.handles & _GENERATIONS).max()))
                beyond = (batch.handles >> GENERATION_BITS) >= end
                ids, old = batch.ids[beyond], batch.handles[beyond]
                new = places[taken : taken + ids.shape[0]].contiguous()
                taken += ids.shape[0]
                stored = generations[old >> GENERATION_BITS]
                written = stored == (old & _GENERATIONS).to(torch.int32)
                moves.append(_Move(table, ids, old, new, written))
        return moves, newest

    def _copy_rows(self, slab: int, move: _Move) -> None:
        tensors = [self.weights[slab], *self.state[slab :: len(self.slab_configs)]]
        sources = (move.old[move.written] >> GENERATION_BITS).split(_ROWS_AT_ONCE)
        targets = (move.new[move.written] >> GENERATION_BITS).split(_ROWS_AT_ONCE)
        for source, target in zip(sources, targets, strict=True):
            for tensor in tensors:
                tensor[target] = tensor[source]

    def _give_rows(self, slab: int, move: _Move) -> None:
        new = move.new[move.written]
        self.generations[slab][new >> GENERATION_BITS] = (new & _GENERATIONS).to(torch.int32)
        offsets = torch.tensor([0, move.ids.shape[0]], device=self.device)
        ops.set_handles_(
            self.buckets, self.tables, self.meta, move.ids, offsets, [move.table], move.new
        )

    def _find_free_rows(
        self, slab: int, used: int, moves: list[_Move], free: Tensor, generation: int
    ) -> None:
        """After a failure: what no id has is free. Their next handles get a generation."""
        unused = torch.zeros(used, dtype=torch.bool, device=self.device)
        unused[free >> GENERATION_BITS] = True
        for move in moves:
            now = self.find(*self._one_table(move.table, move.ids)).handles
            unused[move.old >> GENERATION_BITS] = True
            unused[now >> GENERATION_BITS] = False
        rows = unused.nonzero()[:, 0]
        self.free_rows[slab, : rows.shape[0]] = (rows << GENERATION_BITS) | generation
        self.slabs[slab, Slab.FREE_COUNT] = rows.shape[0]
        self.bind_memory()


__all__ = ["Compaction"]
