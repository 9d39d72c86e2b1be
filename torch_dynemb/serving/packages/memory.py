"""Memory for the constants of a package: aligned, in huge pages, freed as a whole."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import HostMemoryError
from torch_dynemb.files.tensor_file import StoredTensor

ALIGNMENT = 64  # bytes: a bucket of an index is one line of the cache
_HUGE_PAGE = 2 << 20
_HUGE_PAGES_FROM = 1 << 20  # below, a page of 2 MiB would be mostly empty


class ConstantMemory:
    """Memory for tensors, each aligned to 64 bytes.

    The tensors do not own it: it is unmapped when this object is freed, even if tensors remain. A
    compiled model keeps references to its constants forever, so memory owned by them would never be
    freed.

    Args:
        tensors: dtype and shape by name.

    Attributes:
        tensors: by name, of zeros.

    Raises:
        HostMemoryError: memory is short.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        begins: dict[str, int] = {}
        size = 0
        for name, stored in tensors.items():
            begins[name] = size
            size += -(-stored.bytes // ALIGNMENT) * ALIGNMENT
        huge = size >= _HUGE_PAGES_FROM
        try:
            # private, because shared memory has no huge pages on most systems
            self._pages = mmap.mmap(
                -1,
                max(1, size + (_HUGE_PAGE if huge else 0)),
                flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            )
        except OSError as error:
            raise too_large(size, f"the system has no memory ({error})") from error
        if size > (free := ops.available_memory()):  # pages are taken when they are touched
            raise too_large(size, f"{free} bytes of memory are free")
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        if huge:
            self._pages.madvise(mmap.MADV_HUGEPAGE)
            first = -(-first // _HUGE_PAGE) * _HUGE_PAGE
        self._first, self._end = first, first + size
        self.tensors = {
            name: tensor_at(first + begins[name], stored) for name, stored in tensors.items()
        }

    def has(self, tensor: Tensor) -> bool:
        """Return whether the values of a CPU tensor lie here."""
        return self._first <= tensor.data_ptr() < self._end


def too_large(size: int, why: str) -> HostMemoryError:
    return HostMemoryError(
        f"serving.load: the constants take {size} bytes, but {why}: close other models, serve on a "
        "machine with more memory, or export with less headroom"
    )


def tensor_at(address: int, stored: StoredTensor) -> Tensor:
    """Make a tensor on memory that it does not own."""
    if stored.bytes == 0:
        return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    memory = (ctypes.c_ubyte * stored.bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(stored.dtype).reshape(stored.shape)


__all__ = ["ALIGNMENT", "ConstantMemory", "tensor_at", "too_large"]
