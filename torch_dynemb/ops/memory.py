"""Reserved memory: tensors whose pages are taken when they are first touched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb._library import register_fake

_DTYPE_CODES = {torch.float32: 0, torch.int32: 1, torch.int64: 2}


def reserve(size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool = False) -> Tensor:
    """A zero-filled CPU tensor of reserved virtual memory.

    Its shape and address never change, so a table in it grows without copies and without
    recompilation. Only touched pages take memory. Cloning or saving the whole tensor touches all.

    Args:
        size: shape; may far exceed the machine's memory.
        dtype: float32, int32 or int64.
        huge_pages: ask for 2 MiB pages beyond the first 4 MiB.

    Raises:
        TypeError: another dtype.
        RuntimeError: the address space, or the system's overcommit policy, does not allow it.
    """
    if dtype not in _DTYPE_CODES:
        raise TypeError(f"reserve: dtype is {dtype}, expected float32, int32 or int64")
    tensor: Tensor = torch.ops.dynemb.reserve(list(size), _DTYPE_CODES[dtype], huge_pages)
    return tensor


def available_memory() -> int:
    """Bytes of memory that can still be taken: the system's, or what the control group has left."""
    available: int = torch.ops.dynemb.available_memory()
    return available


@register_fake("reserve")
def _reserve_fake(size: Sequence[int], dtype: int, huge_pages: bool) -> Tensor:
    dtypes = {code: dtype for dtype, code in _DTYPE_CODES.items()}
    return torch.empty(size, dtype=dtypes[dtype])
