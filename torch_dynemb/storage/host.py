"""The CPU's memory."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import HostMemoryError
from torch_dynemb.ops.columns import Meta, Slab
from torch_dynemb.ops.pending import PendingGradients
from torch_dynemb.ops.tensors import IndexTensors, RowTensors
from torch_dynemb.storage.address_space import what_ran_out
from torch_dynemb.storage.tiers.host_store import HostStore


class HostMemory:
    """Memory of the CPU: pages are allocated at the first write, so ``bind`` does nothing."""

    device = torch.device("cpu")
    has_cache = False  # rows of a HostStore are here
    has_graphs = False

    def total_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def total_bytes_with(self, storage: HostStore) -> int:
        return self.total_bytes()

    def reserve(self, size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> Tensor:
        try:
            return ops.reserve(size, dtype, huge_pages=huge_pages)
        except RuntimeError:
            wanted = math.prod(size) * dtype.itemsize
            raise HostMemoryError(
                f"TableGroup: could not reserve {wanted} bytes of addresses for a tensor of "
                f"{size[0]} rows: {what_ran_out(wanted)}"
            ) from None  # the op's own error names another remedy

    def bind(
        self,
        index: IndexTensors,
        rows: RowTensors,
        table_buckets: Sequence[int] = (),
        slab_rows: Sequence[int] = (),
    ) -> None:
        pass

    def split_rows(self, index: IndexTensors, slabs: Sequence[int], storage: HostStore) -> None:
        pass  # all memory is host memory

    def split_bytes(self, index: IndexTensors) -> tuple[int, int]:
        return 0, 0

    def is_capturing(self) -> bool:
        return False

    def beside(self, *inputs: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_beside(self) -> None:
        pass

    def end_step(self, index: IndexTensors, rows: RowTensors) -> None:
        pass

    def release(self, index: IndexTensors, rows: RowTensors, slab_rows: Sequence[int]) -> None:
        for table in range(index.tables.shape[0]):
            active = index.active_buckets(table)
            end = active.start + int(index.meta[table, Meta.REGION_BUCKETS])
            ops.release_(index.buckets, active.stop, end)
            if index.scores.shape[0] > 0 and not bool(index.meta[table, Meta.UNSCORED]):
                ops.release_(index.scores, active.stop, end)
        slabs = len(rows.weights)
        for slab, used in enumerate(slab_rows):
            dirty_bits = rows.dirty_bits[slab : slab + 1]
            for tensor in (rows.weights[slab], *rows.state[slab::slabs], *dirty_bits):
                ops.release_(tensor, used, tensor.shape[0])
            free = index.free_rows[slab]
            ops.release_(free, int(index.slabs[slab, Slab.FREE_COUNT]), free.shape[0])
        if rows.pending:
            pending = PendingGradients.of(rows.pending)
            for slab, count in enumerate(pending.counts[:, 0].tolist()):
                ops.release_(pending.gradients[slab], count, pending.gradients[slab].shape[0])
                for entries in (pending.handles, pending.ids, pending.tables):
                    ops.release_(entries[slab], count, entries[slab].shape[0])


__all__ = ["HostMemory"]
