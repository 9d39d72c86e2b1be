"""Modes of torch while a checkpoint is read or written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def plain_torch() -> Iterator[None]:
    """Create tensors on the CPU and record no gradients, in this thread, within the context.

    Inference mode is left, because tensors created in it cannot be written to later.
    """
    default = torch.get_default_device()
    on_cpu = nullcontext() if default.type == "cpu" else torch.device("cpu")
    with on_cpu, torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch in the calling thread alone, within the context.

    Pieces are small, and a disk is slower than one thread. If other programs use the cores, threads
    that synchronize after each piece are ten times slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


__all__ = ["one_thread", "plain_torch"]
