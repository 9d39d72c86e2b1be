"""Gives memory back that removed ids have left behind."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.group_parts import GroupParts, exported
from torch_dynemb.ops.columns import GENERATION_BITS, Slab

_ROWS_AT_ONCE = 1 << 16
_GENERATIONS = (1 << GENERATION_BITS) - 1


class Compaction(GroupParts):
    """The part of a table group that gives memory back."""

    def compact(self) -> int:
        """Moves rows together, shrinks the indexes, and gives the memory beyond them back.

        Between training steps only: handles of a forward whose backward is still to come become
        stale, and their gradients are dropped and counted. Tensors keep shape and address.

        Returns:
            By how many bytes :meth:`memory` has shrunk.
        """
        before = self.memory()["total"]
        for slab in range(len(self.slab_configs)):
            self._compact_rows(slab)
        for table in range(self.tables.shape[0]):
            ops.shrink_(self.buckets, self.scores, self.tables, self.meta, table, 0)
        self.release_memory()
        return before - self.memory()["total"]

    def _compact_rows(self, slab: int) -> None:
        """Rows at the end move to where ids were removed; the order follows the index."""
        row = self.slabs[slab]
        used, count = int(row[Slab.NEXT_ROW]), int(row[Slab.FREE_COUNT])
        if count == 0:
            return
        end = used - count
        free = self.free_rows[slab, :count].clone()
        places = free[(free >> GENERATION_BITS) < end].sort().values
        newest = int((free & _GENERATIONS).max())
        taken = 0
        for table in range(len(self.tables_config)):
            if self.slab_of(table) != slab:
                continue
            for batch in exported(self, table, 1 << 20):
                newest = max(newest, int((batch.handles & _GENERATIONS).max()))
                beyond = (batch.handles >> GENERATION_BITS) >= end
                ids, old = batch.ids[beyond], batch.handles[beyond]
                new = places[taken : taken + ids.shape[0]]
                taken += ids.shape[0]
                self._move_rows(slab, old, new)
                offsets = torch.tensor([0, ids.shape[0]], device=self.device)
                ops.set_handles_(
                    self.buckets, self.tables, self.meta, ids, offsets, [table], new.contiguous()
                )
        # handles that are still out there are older, and what comes next is newer
        self.generations[slab][end:used] = newest + 1
        row[Slab.GENERATION] = newest + 1
        row[Slab.NEXT_ROW] = end
        row[Slab.FREE_COUNT] = 0
        row[Slab.COMMITTED_ROWS] = end

    def _move_rows(self, slab: int, old: Tensor, new: Tensor) -> None:
        generations = self.generations[slab]
        tensors = [self.weights[slab], *self.state[slab :: len(self.slab_configs)]]
        for first in range(0, old.shape[0], _ROWS_AT_ONCE):
            source, target = old[first : first + _ROWS_AT_ONCE], new[first : first + _ROWS_AT_ONCE]
            rows = source >> GENERATION_BITS
            written = generations[rows] == (source & _GENERATIONS).to(torch.int32)
            rows, target = rows[written], target[written]
            places = target >> GENERATION_BITS
            for tensor in tensors:
                tensor[places] = tensor[rows]
            generations[places] = (target & _GENERATIONS).to(torch.int32)


__all__ = ["Compaction"]
