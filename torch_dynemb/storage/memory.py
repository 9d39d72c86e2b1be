"""Where a group of tables lies: reserved memory of the CPU, or of one GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import described
from torch_dynemb.ops.columns import Meta, Slab, Table
from torch_dynemb.ops.pending import PendingGradients
from torch_dynemb.storage.address_space import what_ran_out

if TYPE_CHECKING:
    from torch_dynemb.table.group import TableGroup


class TableMemory(Protocol):
    """What a group asks of the device that it lies on."""

    @property
    def device(self) -> torch.device:
        """Of all tensors of the group."""

    def total_bytes(self) -> int:
        """Memory of the machine or the GPU."""

    def reserve(self, size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> Tensor:
        """A zero-filled tensor that takes memory as the group grows."""

    def bind(self, group: TableGroup, buckets: Sequence[int], rows: Sequence[int]) -> None:
        """Takes note of what the group holds; makes room for at least so much."""

    def end_step(self, group: TableGroup) -> None:
        """Ends a training step."""

    def release(self, group: TableGroup) -> None:
        """Gives memory back beyond what the group holds; generations of rows stay."""


class HostMemory:
    """The CPU's: pages are taken when they are touched, so there is nothing to bind."""

    device = torch.device("cpu")

    def total_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def reserve(self, size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> Tensor:
        try:
            return ops.reserve(size, dtype, huge_pages=huge_pages)
        except RuntimeError:
            wanted = math.prod(size) * dtype.itemsize
            raise RuntimeError(
                f"TableGroup: could not reserve {wanted} bytes of addresses for a tensor of "
                f"{size[0]} rows: {what_ran_out(wanted)}"
            ) from None  # the op's own error names another remedy

    def bind(self, group: TableGroup, buckets: Sequence[int], rows: Sequence[int]) -> None:
        pass

    def end_step(self, group: TableGroup) -> None:
        pass

    def release(self, group: TableGroup) -> None:
        for table in range(group.tables.shape[0]):
            active = group.active_buckets(table)
            end = active.start + int(group.meta[table, Meta.REGION_BUCKETS])
            ops.release_(group.buckets, active.stop, end)
            if group.scores.shape[0] > 0 and not bool(group.meta[table, Meta.UNSCORED]):
                ops.release_(group.scores, active.stop, end)
        for slab in range(len(group.slab_configs)):
            used = group.used_rows(slab)
            for tensor in (group.weights[slab], *group.state[slab :: len(group.slab_configs)]):
                ops.release_(tensor, used, tensor.shape[0])
            free = group.free_rows[slab]
            ops.release_(free, int(group.slabs[slab, Slab.FREE_COUNT]), free.shape[0])
        if group.pending:
            pending = PendingGradients.of(group.pending)
            for slab, count in enumerate(pending.counts[:, 0].tolist()):
                ops.release_(pending.gradients[slab], count, pending.gradients[slab].shape[0])
                for entries in (pending.handles, pending.ids, pending.tables):
                    ops.release_(entries[slab], count, entries[slab].shape[0])


class CudaMemory:
    """A GPU's: memory is mapped into reserved addresses, which the index ops do as ids arrive.

    Args:
        device: of CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.index = index

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def reserve(self, size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> Tensor:
        return ops.reserve_cuda(size, dtype, self.index)

    def bind(self, group: TableGroup, buckets: Sequence[int], rows: Sequence[int]) -> None:
        ops.bind_group(
            group.buckets,
            group.scores,
            group.tables,
            group.slabs,
            group.free_rows,
            group.meta,
            group.weights,
            group.generations,
            group.state,
            group.pending,
            [int(n) for n in buckets] or [0] * group.tables.shape[0],
            [int(n) for n in rows] or [0] * len(group.slab_configs),
            group.policy,
        )

    def end_step(self, group: TableGroup) -> None:
        ops.end_step(group.buckets, group.tables, group.row_clock)

    def release(self, group: TableGroup) -> None:
        ops.release_group(
            group.buckets,
            group.tables[:, Table.BUCKET_COUNT].tolist(),
            [group.used_rows(slab) for slab in range(len(group.slab_configs))],
        )
        self.bind(group, [], [])


def check_device(owner: str, device: torch.device) -> None:
    """Raises RuntimeError for a device on which tables cannot lie."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise RuntimeError(f"{owner}: device is {device}, expected the CPU or a CUDA device")
    if not ops.has_cuda_kernels():
        raise RuntimeError(
            f"{owner}: device is {device}, but this torch_dynemb was built without CUDA kernels: "
            "build it with DYNEMB_CUDA=1, where nvcc is on PATH or in CUDA_HOME, or keep the table "
            "on the CPU"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{owner}: device is {device}, but torch finds no CUDA device: keep the table on the "
            "CPU"
        )


def device_of(owner: str, device: object) -> torch.device:
    """The device of that name.

    Raises:
        TypeError: it is neither a device nor a name.
        RuntimeError: there is no such kind of device.
    """
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"{owner}: device is {described(device)}, expected a torch.device or str")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise RuntimeError(f"{owner}: device is {device!r}: {error}") from None


def memory_of(owner: str, device: torch.device | str | None) -> TableMemory:
    """The memory of a device; None: torch's default device.

    Raises:
        RuntimeError: tables cannot lie there.
    """
    chosen = torch.get_default_device() if device is None else device_of(owner, device)
    check_device(owner, chosen)
    return HostMemory() if chosen.type == "cpu" else CudaMemory(chosen)


__all__ = ["CudaMemory", "HostMemory", "TableMemory", "check_device", "device_of", "memory_of"]
