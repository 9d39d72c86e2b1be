"""Guards of modules with tables: calls of torch and lookups that rows cannot take part in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_dynemb.nn import backward_updates
from torch_dynemb.nn.conversions import check_conversions
from torch_dynemb.nn.gradient_clipping import watch_clipping
from torch_dynemb.nn.loss_scaling import watch_scalers
from torch_dynemb.nn.replication import (
    has_other_ranks,
    is_replicated,
    refuse_other_ranks,
    refuse_replicated,
)
from torch_dynemb.nn.zero_grad import zero_rows_too
from torch_dynemb.storage.tiers.tiers import Tiers


def watch_tables(module: Any) -> None:
    """Have calls of torch checked that would come too late for the rows of a module.

    Args:
        module: a ``TableModule``.
    """
    backward_updates.register_tables(module)
    watch_scalers()
    watch_clipping()
    check_conversions()
    zero_rows_too()


def check_call(module: Any, anchor: nn.Parameter) -> None:
    """Raise RuntimeError where a live table cannot be looked up.

    Args:
        module: a ``TableModule``.
        anchor: the module's now.
    """
    if not torch.compiler.is_compiling():
        if torch._C._is_tracing():
            raise RuntimeError(
                f"{type(module).__name__}: a live table cannot be traced by torch.jit (the trace "
                "would hold its whole reservation): trace torch_dynemb.freeze(model)"
            )
        if module._copied_anchor is not None or module._given_entries:
            module._check_not_averaged()
    elif torch.compiler.is_exporting():
        raise RuntimeError(
            f"{type(module).__name__}: a live table cannot be exported (its whole reservation "
            "would be saved): export torch_dynemb.freeze(model)"
        )
    if (
        module._can_be_wrapped
        and module._ranks is None
        and is_replicated(anchor, module._own_anchor[0])
    ):
        refuse_replicated(module)


def check_other_ranks(module: Any) -> None:
    """Raise RuntimeError unless all ranks share the rows, or are meant not to.

    Args:
        module: a ``TableModule``.
    """
    if has_other_ranks() and not (module._private_to_rank or module._is_shared()):
        refuse_other_ranks(module, module.group.names)


def check_same_step(owner: str, tiers: Tiers, epoch: int, gradient: Tensor) -> None:
    """Raise RuntimeError if rows of a gradient may have left memory.

    Args:
        owner: class of the module.
        tiers: of its tables.
        epoch: of the tiers, at the lookup.
        gradient: of its rows, unused: a hook gets it.
    """
    if tiers.epoch != epoch:
        raise RuntimeError(
            f"{owner}: backward of a lookup {tiers.epoch - epoch} steps ago, since when its rows "
            "may have left memory: call backward before optimizer.step(), or leave storage out"
        )


__all__ = ["check_call", "check_other_ranks", "check_same_step", "watch_tables"]
