"""Owners of the rows of a slab, found by a scan of the index.

Rows are then read in the order in which they lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.checkpoint.saving.source import GroupSource
from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS, GENERATION_MASK, Table

_BUCKETS_AT_ONCE = 1 << 16
_ROWS_AT_ONCE = 1 << 16


class OccupiedSlots(NamedTuple):
    """Ids in a piece of an index.

    Attributes:
        slots: int64 [n], ascending: bucket * 4 + slot.
        ids: int64 [n].
        stored: int64 [n], a handle or a count, plus 1.
    """

    slots: Tensor
    ids: Tensor
    stored: Tensor


def occupied_slots(buckets: Tensor) -> Iterator[OccupiedSlots]:
    """Iterate over the ids of a table in pieces, on the CPU.

    Args:
        buckets: int64 [buckets, 8].
    """
    for begin in range(0, buckets.shape[0], _BUCKETS_AT_ONCE):
        piece = buckets[begin : begin + _BUCKETS_AT_ONCE].cpu()
        stored = piece[:, BUCKET_WIDTH:].reshape(-1)
        slots = stored.nonzero()[:, 0]
        ids = piece[:, :BUCKET_WIDTH].reshape(-1)
        yield OccupiedSlots(slots + begin * BUCKET_WIDTH, ids[slots], stored[slots])


class RowOrder:
    """Owners of the rows of a slab.

    It takes at most 17 bytes per row, and 21 for rows in a store or read during training.

    Args:
        source: the group.
        slab: number of the slab.
    """

    def __init__(self, source: GroupSource, slab: int) -> None:
        used = source.slabs[slab].used
        stored = source.slabs[slab].reader is not None
        config = source.config
        tables = [t for t in range(len(config.tables)) if config.slab_of(t) == slab]
        buckets = max((source.buckets(t).shape[0] for t in tables), default=0)
        slot_dtype = torch.int32 if buckets * BUCKET_WIDTH < 1 << 31 else torch.int64
        owner_dtype = torch.uint8 if len(tables) < 255 else torch.int32
        self.ids = torch.zeros(used, dtype=torch.int64, device="cpu")
        self.slots = torch.zeros(used, dtype=slot_dtype, device="cpu")
        owner = torch.zeros(used, dtype=owner_dtype, device="cpu")  # 0: free
        # rows that were copied have their generations beside them
        self.generations = torch.zeros(used if stored else 0, dtype=torch.int32, device="cpu")
        for k, t in enumerate(tables):
            for piece in occupied_slots(source.buckets(t)):
                handles = piece.stored - 1
                rows = handles >> GENERATION_BITS
                if stored:
                    self.generations[rows] = (handles & GENERATION_MASK).to(torch.int32)
                self.ids[rows] = piece.ids
                self.slots[rows] = piece.slots.to(slot_dtype)
                owner[rows] = k + 1
        counts = [int(source.tables[t, Table.SIZE]) for t in tables]
        rows_by_table = [None] if counts == [used] else _rows_by_owner(owner, counts)
        self._rows = dict(zip(tables, rows_by_table, strict=True))

    def rows_of(self, table: int) -> Tensor | None:
        """Return the row numbers of a table, ascending; None if it owns all rows of the slab."""
        return self._rows[table]


def _rows_by_owner(owner: Tensor, counts: list[int]) -> list[Tensor]:
    """Group row numbers by owner, ascending.

    Args:
        owner: integer [rows], from 1; 0 for free rows.
        counts: number of rows of each owner.
    """
    dtype = torch.int32 if owner.shape[0] < 1 << 31 else torch.int64
    result = [torch.empty(count, dtype=dtype, device="cpu") for count in counts]
    filled = [0] * len(counts)
    for begin in range(0, owner.shape[0], _ROWS_AT_ONCE):
        piece = owner[begin : begin + _ROWS_AT_ONCE]
        order = torch.argsort(piece, stable=True).add_(begin)
        first, *here = torch.bincount(piece, minlength=len(counts) + 1).tolist()
        for k, rows in enumerate(order[first:].split(here)):
            result[k][filled[k] : filled[k] + here[k]] = rows
            filled[k] += here[k]
    return result


__all__ = ["OccupiedSlots", "RowOrder", "occupied_slots"]
