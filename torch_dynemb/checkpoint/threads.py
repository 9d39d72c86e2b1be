"""How many threads of torch work on a checkpoint: one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """While it lasts, torch computes in the calling thread alone.

    Pieces are small, and the disk is slower than one thread. Where other programs use the cores,
    threads that wait for each other at every piece take ten times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


__all__ = ["one_thread"]
