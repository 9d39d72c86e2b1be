"""Context without the torch modes that a program may have set.

A checkpoint has the same content in all of them.
"""

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


__all__ = ["plain_torch"]
