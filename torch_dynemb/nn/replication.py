"""Refuses training that would give every rank its own diverging copy of a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from torch_dynemb.errors import ReplicatedTableError

# Its ``default_pg`` is the default process group or None, at a fifth of the time of a public call.
WORLD = distributed_c10d._world
_SHARED_BY = "torch_dynemb.torchrec, torch_dynemb.recis and torch_dynemb.oneembedding"


def is_replicated(anchor: nn.Parameter, original: nn.Parameter) -> bool:
    """Return whether a table is inside DistributedDataParallel, FSDP, or the like.

    Args:
        anchor: the ``grad_anchor`` that the module has now; a wrapper would replace it.
        own: that the module has made itself.
    """
    return anchor is not original or DistributedDataParallel._active_ddp_module is not None


def refuse_replicated(module: nn.Module) -> None:
    """Raise ReplicatedTableError, which names the wrapper that the table is inside.

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
                "grad_anchor, which is not a weight and must stay the module's own: leave the "
                "entries that end in 'grad_anchor' out of the parameters; rows are read and "
                "written by module.group"
            )
        replicated_by = f"{replaced_by} (its grad_anchor has been replaced)"
    raise ReplicatedTableError(
        f"{owner}: the table is inside {replicated_by}, which would give "
        "every rank its own diverging copy: construct it with "
        "process_group=torch.distributed.group.WORLD, so that ranks share the rows, or use tables "
        f"of {_SHARED_BY}; on one rank, wrap only the dense part of the model"
    )


def has_other_ranks() -> bool:
    """Return whether the default process group has ranks beside this one."""
    return dist.is_initialized() and dist.get_world_size() > 1


def refuse_other_ranks(module: nn.Module, names: Sequence[str]) -> None:
    """Raise ReplicatedTableError: each rank would train the rows on its own.

    Args:
        module: with the tables.
        names: of its tables.
    """
    raise ReplicatedTableError(
        f"{type(module).__name__} (tables {list(names)}): a training lookup, but the process group "
        f"has {dist.get_world_size()} ranks, and each would train its own diverging copy of the "
        "rows: construct the module with process_group=torch.distributed.group.WORLD, so that "
        f"ranks share the rows, or use tables of {_SHARED_BY}. If only this rank trains the "
        "tables, as in a pipeline, or each rank or group has ids or a model of its own, call "
        "torch_dynemb.private_to_rank(model) first; lookups in eval mode and under "
        "torch.no_grad() are allowed",
        tables=names,
    )


def _in_functional_call() -> bool:
    code = functional_call.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


__all__ = ["WORLD", "has_other_ranks", "is_replicated", "refuse_other_ranks", "refuse_replicated"]
