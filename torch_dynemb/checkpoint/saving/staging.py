"""Copies of what a save in the background writes, while training goes on."""

from __future__ import annotations

import socket
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dynemb import ops
from torch_dynemb.checkpoint.together import Ranks
from torch_dynemb.errors import HostMemoryError
from torch_dynemb.storage.address_space import what_ran_out

T = TypeVar("T")

_HUGE_FROM = 4 << 20  # bytes from which on large pages are worth their address space


def staged(ranks: Ranks, source: T, spare: int) -> T:
    """Copies, on the CPU, of all tensors of what a rank saves; all ranks call it.

    A copy waits for what the GPU of its tensor has been given to do, in whatever stream.

    Args:
        ranks: that save.
        source: named tuples, lists and dicts with tensors.
        spare: bytes of memory that the save takes besides.

    Returns:
        The same with copies.

    Raises:
        HostMemoryError: memory is short on a machine, which all ranks say before any has made a
            copy; or there are no addresses.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(source) if isinstance(leaf, Tensor)]
    needed = sum(_bytes_of(tensor) for tensor in tensors) + spare
    machine = socket.gethostname()
    told = ranks.gather((machine, needed))
    here = [of_rank for name, of_rank in told if name == machine]
    ranks.run(lambda: _check_memory(here))
    return ranks.run(lambda: _copied(source, tensors))


def _check_memory(needed: list[int]) -> None:
    """Raises HostMemoryError where the ranks of this machine need more than is free."""
    free = ops.available_memory()
    if sum(needed) > free:
        ranks = f" for {len(needed)} ranks on this machine" if len(needed) > 1 else ""
        raise HostMemoryError(
            f"checkpoint.save: asynchronous=True needs {sum(needed)} bytes of memory for "
            f"copies{ranks}, but {free} bytes are free: save without asynchronous, or on a machine "
            "with more memory"
        )


def _copied(source: T, tensors: list[Tensor]) -> T:
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    result: Any = pytree.tree_map_only(Tensor, _copy, source)
    copies: T = result
    return copies


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU."""
    size = _bytes_of(tensor)
    if size < _HUGE_FROM:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    try:
        memory = ops.reserve([size], torch.uint8, huge_pages=True)
    except RuntimeError:
        raise HostMemoryError(
            f"checkpoint.save: no addresses for a copy of {size} bytes: {what_ran_out(size)}"
        ) from None
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


__all__ = ["staged"]
