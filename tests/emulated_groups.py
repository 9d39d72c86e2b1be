"""Table groups on emulated CUDA kernels, in memory that is mapped as they grow."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from emulator.mode import EmulatedCuda, Stream, capturing
from group_calls import same_bits, with_free_steps
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.nn import optimized_later
from torch_dynemb.ops import memory, row_copies, serving
from torch_dynemb.storage.cuda import CudaMemory
from torch_dynemb.table import extension
from torch_dynemb.table import group as table
from torch_dynemb.table import state as table_state

ADDRESS_SPACE = 1 << 36  # bytes that a tensor reserves by default


class EmulatedMemory(CudaMemory):
    """Of the emulator's one device; its tensors are CPU tensors."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.index = 0

    def total_bytes(self) -> int:
        return ADDRESS_SPACE

    def reserve(self, size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> Tensor:
        code = memory._DTYPE_CODES[dtype]
        reserved: Tensor = torch.ops.dynemb.reserve_cuda(list(size), code, self.index)
        return reserved

    def is_capturing(self) -> bool:
        return capturing()

    @contextmanager
    def beside(self, *inputs: Tensor) -> Iterator[None]:
        current = Stream.current()
        if capturing():
            yield
            return
        _side_stream().wait_stream(current)
        with _side_stream().chosen():
            yield
        _inputs_beside.append(inputs)

    def wait_beside(self) -> None:
        if not capturing():
            Stream.current().wait_stream(_side_stream())


# What work beside the current stream may still read.
_inputs_beside: deque[tuple[Tensor, ...]] = deque(maxlen=256)


@functools.cache
def _side_stream() -> Stream:
    return Stream.new()


@contextmanager
def emulated_cuda() -> Iterator[EmulatedCuda]:
    """Ops on CPU tensors run as CUDA kernels; groups reserve memory, and frozen tables look ids
    up, as on a GPU."""
    with (
        patch.object(table, "memory_of", lambda owner, device: EmulatedMemory()),
        patch.object(extension, "memory_of", lambda owner, device: EmulatedMemory()),
        patch.object(optimized_later, "memory_of", lambda owner, device: EmulatedMemory()),
        patch.object(row_copies, "_on_gpu", lambda rows: True),
        patch.object(serving, "in_host_memory", lambda tensor: False),
        EmulatedCuda() as mode,
    ):
        yield mode


def different_state(a: td.TableGroup, b: td.TableGroup, *, rounded: bool = False) -> list[str]:
    """Names of used parts of two groups that are not equal bit for bit.

    Args:
        rounded: floats need only be close.
    """
    state_a, state_b = (
        {
            name: with_free_steps(tensor.cpu()) if name.endswith(".scores") else tensor.cpu()
            for name, tensor in table_state.used_tensors(group.tables)
        }
        for group in (a, b)
    )
    assert state_a.keys() == state_b.keys()
    return [
        name
        for name, tensor in state_a.items()
        if not (
            torch.allclose(tensor, state_b[name], rtol=1e-4, atol=1e-6)
            if rounded and tensor.is_floating_point() and tensor.shape == state_b[name].shape
            else same_bits(tensor, state_b[name])
        )
    ]
