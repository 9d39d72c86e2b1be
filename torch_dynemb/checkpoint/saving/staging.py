"""Copies for a save that writes in the background."""

from __future__ import annotations

import socket
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dynemb import ops
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.errors import HostMemoryError
from torch_dynemb.ops.row_copies import read_rows_
from torch_dynemb.storage.address_space import what_ran_out

T = TypeVar("T")

_HUGE_FROM = 4 << 20  # smallest size in bytes for large pages
_SMALL_PAGES = 4 << 20  # bytes of reserved memory that have no large pages
_HUGE_PAGE = 2 << 20


def staged(ranks: Ranks, source: T, spare: int) -> T:
    """Copy all tensors of a rank's source to the CPU. All ranks call it.

    A copy waits for pending GPU work on its tensor, in any stream.

    Args:
        ranks: ranks that save.
        source: named tuples, lists and dicts with tensors.
        spare: bytes of memory that the save needs besides.

    Returns:
        The same structure with copies.

    Raises:
        HostMemoryError: a machine has too little memory, raised on all ranks before any copy; or
            address space is exhausted.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(source) if isinstance(leaf, Tensor)]
    needed = sum(_bytes_of(tensor) for tensor in tensors) + spare
    machine = socket.gethostname()
    gathered = ranks.gather((machine, needed))
    here = [of_rank for name, of_rank in gathered if name == machine]
    ranks.run(lambda: _check_memory(here))
    return ranks.run(lambda: _copied(source, tensors))


def _check_memory(needed: list[int]) -> None:
    """Raise HostMemoryError if the ranks of this machine need more than is free."""
    free = ops.available_memory()
    if sum(needed) > free:
        ranks = f" for {len(needed)} ranks on this machine" if len(needed) > 1 else ""
        raise HostMemoryError(
            f"checkpoint.save: asynchronous=True needs {sum(needed)} bytes of memory for "
            f"copies{ranks}, but {free} bytes are free: save without asynchronous, or on a machine "
            "with more memory"
        )


def _copied(source: T, tensors: list[Tensor]) -> T:
    # Of the device, not of streams: only the program knows in which ones it writes dense state.
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    result: Any = pytree.tree_map_only(Tensor, _copy, source)
    copies: T = result
    return copies


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, contiguous."""
    size = _bytes_of(tensor)
    if size < _HUGE_FROM:
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        read_rows_(memory, tensor)
        return memory
    try:
        memory = _in_huge_pages(size).view(tensor.dtype).view(tensor.shape)
    except RuntimeError:
        raise HostMemoryError(
            f"checkpoint.save: no addresses for a copy of {size} bytes: {what_ran_out(size)}"
        ) from None
    read_rows_(memory, tensor)
    return memory


def _in_huge_pages(size: int) -> Tensor:
    """Reserve memory of large pages alone, uint8 [size]: each small page costs a page fault."""
    reserved = ops.reserve([_SMALL_PAGES + 2 * _HUGE_PAGE + size], torch.uint8, huge_pages=True)
    begin = _SMALL_PAGES + -(reserved.data_ptr() + _SMALL_PAGES) % _HUGE_PAGE
    return reserved[begin : begin + size]


__all__ = ["staged"]
