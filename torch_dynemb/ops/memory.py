"""Reserved memory: tensors far larger than their content, so that they never move.

On the CPU pages are taken when they are first touched. On a GPU index ops map memory before they
launch, for groups registered by :func:`bind_group`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.tensors import IndexTensors, RowTensors
from torch_dynemb.process.interrupts import defer_signals

_DTYPE_CODES = {
    torch.float32: 0,
    torch.int32: 1,
    torch.int64: 2,
    torch.bfloat16: 3,
    torch.float16: 4,
    torch.uint8: 5,
}
_END_STEP = torch.ops.dynemb.end_step_.default
# Inductor ends a CUDA graph before it. The ABI of the compiled library has no tags.
_END_STEP.tags.append(torch.Tag.cudagraph_unsafe)
# a constant, because what asks torch's dispatcher is not compiled
_HAS_CUDA_KERNELS = torch._C._dispatch_has_kernel_for_dispatch_key(
    "dynemb::reserve_cuda", "CompositeExplicitAutograd"
)


@raises_typed_errors
def reserve(size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool = False) -> Tensor:
    """Make a zero-filled CPU tensor of reserved virtual memory.

    Its shape and address never change, so a table in it grows without copies and without
    recompilation. Only touched pages take memory. Cloning or saving the whole tensor touches all.

    Args:
        size: shape; may far exceed the machine's memory.
        dtype: float32, bfloat16, float16, int32, int64 or uint8.
        huge_pages: ask for 2 MiB pages beyond the first 4 MiB.

    Raises:
        TypeError: another dtype.
        RuntimeError: the address space or the system's overcommit policy does not allow it.
    """
    if dtype not in _DTYPE_CODES:
        raise TypeError(f"reserve: dtype is {dtype}, expected one of {list(_DTYPE_CODES)}")
    tensor: Tensor = torch.ops.dynemb.reserve(list(size), _DTYPE_CODES[dtype], huge_pages)
    return tensor


def available_memory() -> int:
    """Return the bytes of memory that are available, within the limit of the control group."""
    available: int = torch.ops.dynemb.available_memory()
    return available


def being_changed(tensors: Sequence[Tensor]) -> bool:
    """Return whether an op of another thread is changing one of the tensors now.

    Ops of the CPU lock ``index.tables`` while they change an index, and the weights of the first
    slab while they update rows. They lock the counts of pending gradients while they add to them.
    Another thread may also hold them by :func:`locked`.

    Args:
        tensors: such tensors, of any shape; ops of a GPU lock none.
    """
    changed: bool = torch.ops.dynemb.being_changed([tensor.data_ptr() for tensor in tensors])
    return changed


@contextmanager
def locked(tensors: Sequence[Tensor], *, moves_rows: bool = False) -> Iterator[None]:
    """Lock tensors, as ops of the CPU do, for a change of several ops by this thread.

    Ops of other threads that would change them raise InUseError inside the context. A thread may
    nest such contexts.

    Args:
        tensors: as of :func:`being_changed`.
        moves_rows: ids get other rows, or all rows are replaced: lookups of other threads raise
            InUseError, too.

    Raises:
        InUseError: another thread is changing one of the tensors now.
    """
    memory = [tensor.data_ptr() for tensor in tensors]
    is_locked = False
    try:
        with defer_signals():  # Ctrl-C comes once the lock is sure to be released
            _lock(memory, moves_rows)
            is_locked = True
        yield
    finally:
        if is_locked:
            torch.ops.dynemb.unlock_memory(memory, moves_rows)


@raises_typed_errors
def _lock(memory: list[int], moves_rows: bool) -> None:
    torch.ops.dynemb.lock_memory(memory, moves_rows)


def has_cuda_kernels() -> bool:
    """Return whether the library was built with its CUDA kernels."""
    return _HAS_CUDA_KERNELS


def _check_cuda_kernels(op: str) -> None:
    if not has_cuda_kernels():
        raise RuntimeError(
            f"{op}: this torch_dynemb was built without CUDA kernels: build it with "
            "DYNEMB_CUDA=1, where nvcc is on PATH or in CUDA_HOME"
        )


@raises_typed_errors
def reserve_cuda(size: Sequence[int], dtype: torch.dtype, device: int) -> Tensor:
    """Make a CUDA tensor of reserved addresses.

    Do not touch it before :func:`bind_group` has mapped zeroed memory for its first rows, nor
    beyond the mapped part.

    Args:
        size: shape; may far exceed the GPU's memory.
        dtype: float32, bfloat16, float16, int32, int64 or uint8.
        device: index of the GPU.

    Raises:
        TypeError: another dtype.
        RuntimeError: this build has no CUDA kernels, or the driver refuses.
    """
    _check_cuda_kernels("reserve_cuda")
    if dtype not in _DTYPE_CODES:
        raise TypeError(f"reserve_cuda: dtype is {dtype}, expected one of {list(_DTYPE_CODES)}")
    tensor: Tensor = torch.ops.dynemb.reserve_cuda(list(size), _DTYPE_CODES[dtype], device)
    return tensor


def available_cuda_memory(device: int) -> int:
    """Return the bytes of a GPU's memory that are free.

    Args:
        device: index of the GPU.

    Raises:
        RuntimeError: this build has no CUDA kernels, or the GPU does not exist.
    """
    _check_cuda_kernels("available_cuda_memory")
    available: int = torch.ops.dynemb.available_cuda_memory(device)
    return available


@raises_typed_errors
def bind_group(
    index: IndexTensors, rows: RowTensors, table_buckets: Sequence[int], slab_rows: Sequence[int]
) -> None:
    """Register tensors of :func:`reserve_cuda` as a group, and map memory for its content.

    Call it once the group has been filled, and again whenever ``tables`` or ``slabs`` have been
    written from outside. ``rows.dirty_bits`` added since then grow with the rows from then on.
    Waits for the device.

    Args:
        index, rows: of the tables, on a GPU; no value changes.
        table_buckets, slab_rows: least numbers of buckets of each table and rows of each slab to
            map memory for.

    Raises:
        RuntimeError: memory is short, only some of the tensors were reserved, or lists do not fit
            them.
    """
    torch.ops.dynemb.bind_group(
        index.buckets,
        index.scores,
        index.tables,
        index.slabs,
        index.free_rows,
        index.meta,
        rows.weights,
        rows.generations,
        rows.state,
        rows.dirty_bits,
        rows.pending,
        list(table_buckets),
        list(slab_rows),
        index.policy,
    )


@raises_typed_errors
def end_step_(
    index: IndexTensors, rows: RowTensors, *, counted: bool = True, now: int | None = None
) -> None:
    """End a training step of a group.

    Count the step. On a GPU, update the counts of :func:`reported_counts` without waiting. If a
    lookup of the group has been captured in a CUDA graph, make room for the next replays. Call this
    after every replay: without it, the fourth one may refuse new ids, which a later op reports.

    Args:
        index: of the tables; clock changes.
        rows: of the same tables; row_clock changes.
        counted: False: both stay as they are, and nothing happens on the CPU.
        now: the new time in seconds, of a counted step; default: unchanged.

    Raises:
        RuntimeError: tensors do not fit each other, or clock has no step; nothing has changed. On a
            GPU also: kernels of earlier calls have reported an error so far; the group has not been
            bound; or the current stream is being captured.
    """
    clock = index.clock if counted else None
    _END_STEP(index.buckets, index.tables, rows.row_clock, clock, now)


@register_fake("end_step_")
def _end_step_fake(
    buckets: Tensor, tables: Tensor, row_clock: Tensor, clock: Tensor | None, now: int | None
) -> None:
    return None


@raises_typed_errors
def raise_device_errors(device: int) -> None:
    """Raise the errors that kernels on a GPU have reported so far.

    Args:
        device: index of the GPU.

    Raises:
        RuntimeError: names the op.
        NotImplementedError: this build has no CUDA kernels.
    """
    torch.ops.dynemb.raise_device_errors(device)


def release_(tensor: Tensor, begin: int, end: int) -> None:
    """Give back the memory of rows [begin, end) of a reserved CPU tensor; they read as zeros.

    Args:
        tensor: [rows, ...] of any dtype, contiguous. A tensor that :func:`reserve` has not made
            gets the zeros and keeps its memory.
        begin, end: 0 <= begin <= end <= rows.

    Raises:
        RuntimeError: the tensor is not contiguous, or has fewer rows.
    """
    torch.ops.dynemb.release_(tensor, begin, end)


@raises_typed_errors
def split_rows(
    index: IndexTensors, slabs: Sequence[int], *, hbm_bytes: int, host_bytes: int | None
) -> None:
    """Let rows of a group on a GPU lie in host memory that the GPU maps.

    Memory for rows is HBM until ``hbm_bytes`` are used, then pinned host memory. Kernels read and
    write both at the same addresses. Row tensors with less than 16 bytes a row, generations and
    the index stay in HBM, and so does the first page of each tensor. Call it once, after
    :func:`bind_group` and before the first id.

    Args:
        index: of the tables, on a GPU; no value changes.
        slabs: numbers of the slabs with rows that may lie in host memory.
        hbm_bytes: of rows and element states of all these slabs together, at least 0.
        host_bytes: upper bound of their host memory; None: what the machine has.

    Raises:
        RuntimeError: the tensors were not reserved or bound, their rows have been split before, or
            a number is out of range.
    """
    bound = -1 if host_bytes is None else host_bytes
    torch.ops.dynemb.split_rows(index.buckets, list(slabs), hbm_bytes, bound)


@raises_typed_errors
def split_bytes(index: IndexTensors) -> tuple[int, int]:
    """Return the bytes of HBM and of host memory that are mapped for split rows.

    Args:
        index: of the tables, on a GPU.
    """
    hbm, host = torch.ops.dynemb.split_bytes(index.buckets)
    return hbm, host


@raises_typed_errors
def release_group(
    index: IndexTensors, table_buckets: Sequence[int], slab_rows: Sequence[int]
) -> None:
    """Give back memory of a group on a GPU; generations of rows stay. Waits for the device.

    Call :func:`bind_group` afterwards.

    Args:
        index: of the tables, on a GPU; no value in use changes.
        table_buckets, slab_rows: buckets of each table and rows of each slab that are in use.

    Raises:
        RuntimeError: the tensors were not reserved or bound, or lists do not fit them.
    """
    torch.ops.dynemb.release_group(index.buckets, list(table_buckets), list(slab_rows))


@register_fake("release_group")
def _release_group_fake(
    buckets: Tensor, table_buckets: Sequence[int], slab_rows: Sequence[int]
) -> None:
    return None


@register_fake("split_rows")
def _split_rows_fake(
    buckets: Tensor, slabs: Sequence[int], hbm_bytes: int, host_bytes: int
) -> None:
    return None


@register_fake("split_bytes")
def _split_bytes_fake(buckets: Tensor) -> list[int]:
    return [0, 0]


@register_fake("release_")
def _release_fake(tensor: Tensor, begin: int, end: int) -> None:
    return None


@register_fake("reserve")
def _reserve_fake(size: Sequence[int], dtype: int, huge_pages: bool) -> Tensor:
    dtypes = {code: dtype for dtype, code in _DTYPE_CODES.items()}
    return torch.empty(size, dtype=dtypes[dtype], device="cpu")


@register_fake("reserve_cuda")
def _reserve_cuda_fake(size: Sequence[int], dtype: int, device: int) -> Tensor:
    dtypes = {code: dtype for dtype, code in _DTYPE_CODES.items()}
    return torch.empty(size, dtype=dtypes[dtype], device=torch.device("cuda", device))


@register_fake("bind_group")
def _bind_group_fake(
    buckets: Tensor,
    scores: Tensor,
    tables: Tensor,
    slabs: Tensor,
    free_rows: Tensor,
    meta: Tensor,
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    state: Sequence[Tensor],
    dirty_bits: Sequence[Tensor],
    pending: Sequence[Tensor],
    table_buckets: Sequence[int],
    slab_rows: Sequence[int],
    policy: Tensor | None = None,
) -> None:
    return None
