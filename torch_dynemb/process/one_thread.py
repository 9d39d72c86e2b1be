"""Limit to one torch thread while a checkpoint is read or written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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


__all__ = ["one_thread"]
