"""Marks for torch.compile: the shape and address of a table's tensors never change."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterable

import torch
from torch import Tensor


def mark_static(tensors: Iterable[Tensor]) -> None:
    """Mark tensors as static for torch.compile."""
    if "torch._dynamo" not in sys.modules:
        importlib.import_module("torch._dynamo")
        # torch.fx.wrap leaves a cycle of frames: of the import and of all its callers. Without a
        # collection, they would keep the first table of a process alive.
        gc.collect()
    for tensor in tensors:
        # else dynamic=True confuses a dim of a table with a batch size of the same value
        torch._dynamo.mark_static(tensor)
        if tensor.is_cuda:
            # else CUDA graphs of compiled code would copy it before every replay
            torch._dynamo.mark_static_address(tensor)


__all__ = ["mark_static"]
