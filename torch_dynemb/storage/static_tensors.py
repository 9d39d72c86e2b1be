"""Tells torch.compile that tensors of a table never change their shape or address."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterable

import torch
from torch import Tensor


def mark_static(tensors: Iterable[Tensor]) -> None:
    """Marks tensors for torch.compile."""
    if "torch._dynamo" not in sys.modules:
        importlib.import_module("torch._dynamo")
        # torch.fx.wrap leaves frames in a cycle: that of the import, and of all who have called.
        # The first table of a process would live in one of them until a garbage collection.
        gc.collect()
    for tensor in tensors:
        # else dynamic=True takes a batch size that equals a dim of a table for that dim
        torch._dynamo.mark_static(tensor)
        if tensor.is_cuda:
            # else CUDA graphs of compiled code would copy it before every replay
            torch._dynamo.mark_static_address(tensor)


__all__ = ["mark_static"]
