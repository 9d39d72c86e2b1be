"""Torch without the modes that a program may have set: a checkpoint is the same in all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def plain_torch() -> Iterator[None]:
    """While it lasts, this thread makes tensors on the CPU, and records no gradients.

    Tensors that are made in inference mode could not be written to afterwards, and so it is left.
    """
    default = torch.get_default_device()
    on_cpu = nullcontext() if default.type == "cpu" else torch.device("cpu")
    with on_cpu, torch.inference_mode(False), torch.no_grad():
        yield


__all__ = ["plain_torch"]
