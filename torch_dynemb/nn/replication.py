"""Refuses wrappers that would give every rank its own diverging copy of a table."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel


def is_replicated(anchor: nn.Parameter, own: nn.Parameter) -> bool:
    """Whether a table is inside DistributedDataParallel, FSDP, or the like.

    Args:
        anchor: the ``grad_anchor`` that the module has now; a wrapper would replace it.
        own: that the module has made itself.
    """
    return anchor is not own or DistributedDataParallel._active_ddp_module is not None


def refuse_replicated(module: nn.Module) -> None:
    """Raises RuntimeError, which names the wrapper that the table is inside.

    Args:
        module: with the table.
    """
    owner, replicated_by = type(module).__name__, ""
    if DistributedDataParallel._active_ddp_module is not None:
        replicated_by = "DistributedDataParallel"
    else:
        replaced_by = "FSDP or torch.func.functional_call"
        if not torch.compiler.is_compiling():
            replaced_by = "FSDP" if not _in_functional_call() else ""
        if not replaced_by:
            raise RuntimeError(
                f"{owner}: torch.func.functional_call was given a new "
                "grad_anchor, which is no weight and must stay the module's own: leave the "
                "entries that end in 'grad_anchor' out of the parameters; rows are read and "
                "written by module.group"
            )
        replicated_by = f"{replaced_by} (its grad_anchor has been replaced)"
    raise RuntimeError(
        f"{owner}: the table is inside {replicated_by}, which would give "
        "every rank its own diverging copy: wrap only the dense part of the model, or "
        "shard the table"
    )


def _in_functional_call() -> bool:
    code = functional_call.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


__all__ = ["is_replicated", "refuse_replicated"]
