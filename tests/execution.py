"""How kernels run: number of threads, instruction set, and what each thread did."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_dynemb import ops


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs ops on ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def simd(level: int) -> Iterator[None]:
    """Runs kernels with one instruction set."""
    before = ops.simd_level()
    ops.set_simd_level(level)
    try:
        yield
    finally:
        ops.set_simd_level(before)


def simd_levels() -> list[int]:
    """All levels of this machine: the library starts with the best one."""
    return list(range(ops.simd_level() + 1))


def memory_in_use() -> int:
    """Bytes of the default device that are taken: resident ones of this process, or the GPU's."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # freed memory that torch keeps
        free, total = torch.cuda.mem_get_info()
        return total - free
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds_by_thread() -> dict[int, float]:
    """Processor time used so far by each thread of the process."""
    seconds = {}
    for name in os.listdir("/proc/self/task"):
        clock = (~int(name) << 3) | 6  # clock_gettime(2): the CPU clock of a thread
        seconds[int(name)] = time.clock_gettime(clock)
    return seconds
