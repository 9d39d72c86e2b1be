"""Copies of all rows of a GPU's tables beneath a cache, for a save in the background."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.ops.columns import GENERATION_BITS, GENERATION_MASK
from torch_dynemb.storage.tiers.row_records import packed_rows
from torch_dynemb.storage.tiers.tiers import Records

_ROWS_AT_ONCE = 1 << 16


class CopiedSlab(NamedTuple):
    """Rows of a slab in host memory.

    Attributes:
        fields: weights, then optimizer state: [rows, ...] each.
        generations: int32 [rows], those of the handles for which rows have been written.
    """

    fields: list[Tensor]
    generations: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor], generations: Tensor, rows: range) -> CopiedSlab:
        """Copy consecutive rows of tensors.

        Args:
            tensors: weights, then optimizer state.
            generations: int32, of the same rows.
            rows: their numbers.
        """
        copies = []
        for tensor in (*tensors, generations):
            copy = torch.empty(len(rows), *tensor.shape[1:], dtype=tensor.dtype, device="cpu")
            for begin in range(0, len(rows), _ROWS_AT_ONCE):
                piece = rows[begin : begin + _ROWS_AT_ONCE]
                # by a kernel: the driver may refuse a copy from memory of two kinds
                numbers = torch.arange(piece.start, piece.stop, device=tensor.device)
                copy[begin : begin + len(piece)] = tensor.index_select(0, numbers)
            copies.append(copy)
        return cls(copies[:-1], copies[-1])

    def put(self, rows: Tensor, fields: Sequence[Tensor], generations: Tensor) -> CopiedSlab:
        """Replace some rows.

        Args:
            rows: int64 [n], distinct.
            fields, generations: of these rows.
        """
        rows = rows.cpu()
        for copy, values in zip(
            (*self.fields, self.generations), (*fields, generations), strict=True
        ):
            copy.index_copy_(0, rows, values.cpu())
        return self


class CopiedRows:
    """Rows as they were when they were copied; see ``PinnedRecords``.

    Args:
        slabs: their copies by number.
    """

    def __init__(self, slabs: Mapping[int, CopiedSlab]) -> None:
        self._slabs = dict(slabs)

    def read(self, slab: int, table: int, ids: Tensor, handles: Tensor) -> Records:
        """Read rows of ids; see ``PinnedRecords``.

        Args:
            slab, table, ids, handles: as there.
        """
        fields, generations = self._slabs[slab]
        rows = handles >> GENERATION_BITS
        found = generations[rows] == (handles & GENERATION_MASK).to(torch.int32)
        return Records(packed_rows(fields, rows), found)

    def release(self) -> None:
        """Give the memory back."""
        self._slabs.clear()


__all__ = ["CopiedRows", "CopiedSlab"]
