"""The memory of one GPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb._library.library import LIBRARY
from torch_dynemb.ops.columns import Table
from torch_dynemb.ops.tensors import IndexTensors, RowTensors
from torch_dynemb.storage.host import HostMemory
from torch_dynemb.storage.tiers.host_store import HostStore


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return the stream for prefetches of all tables on a GPU."""
    return torch.cuda.Stream(device)


@functools.cache
def share_cached_memory() -> Callable[[], None]:
    """Have tables that need memory take what torch's allocator caches, before a call fails."""

    def empty_cache() -> None:
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.empty_cache()

    function = ctypes.CFUNCTYPE(None)(empty_cache)
    ctypes.CDLL(str(LIBRARY)).dynemb_set_empty_cache(function)
    return function  # the cache keeps it


class CudaMemory:
    """Memory of a GPU, mapped into reserved addresses by the index ops as ids arrive.

    Args:
        device: of CUDA.
    """

    has_cache = True
    has_graphs = True

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.index = index
        if ops.has_cuda_kernels():
            share_cached_memory()

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def total_bytes_with(self, storage: HostStore) -> int:
        host = HostMemory().total_bytes() if storage.host_bytes is None else storage.host_bytes
        return host if storage.cache_size is not None else self.total_bytes() + host

    def reserve(self, size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> Tensor:
        return ops.reserve_cuda(size, dtype, self.index)

    def bind(
        self,
        index: IndexTensors,
        rows: RowTensors,
        table_buckets: Sequence[int] = (),
        slab_rows: Sequence[int] = (),
    ) -> None:
        ops.bind_group(
            index,
            rows,
            [int(n) for n in table_buckets] or [0] * index.tables.shape[0],
            [int(n) for n in slab_rows] or [0] * index.slabs.shape[0],
        )

    def split_rows(self, index: IndexTensors, slabs: Sequence[int], storage: HostStore) -> None:
        ops.split_rows(index, slabs, hbm_bytes=storage.hbm_bytes, host_bytes=storage.host_bytes)

    def split_bytes(self, index: IndexTensors) -> tuple[int, int]:
        return ops.split_bytes(index)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def beside(self, *inputs: Tensor) -> Iterator[None]:
        if self.is_capturing():
            yield  # programs fork and join the streams of a graph
            return
        stream = _side_stream(self.index)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            for tensor in inputs:
                tensor.record_stream(stream)

    def wait_beside(self) -> None:
        if not self.is_capturing():
            torch.cuda.current_stream(self.device).wait_stream(_side_stream(self.index))

    def end_step(self, index: IndexTensors, rows: RowTensors) -> None:
        ops.end_step_(index, rows, counted=False)

    def release(self, index: IndexTensors, rows: RowTensors, slab_rows: Sequence[int]) -> None:
        ops.release_group(
            index,
            index.tables[:, Table.BUCKET_COUNT].tolist(),
            list(slab_rows),
        )
        self.bind(index, rows)


__all__ = ["CudaMemory"]
