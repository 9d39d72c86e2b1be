"""Forwards that repeat another one, as activation checkpointing does."""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch.utils import checkpoint

_REENTRANT = checkpoint.CheckpointFunction.backward.__code__
_FILE = _REENTRANT.co_filename
# the function in which ``use_reentrant=False`` runs a forward again
_AGAIN = "recompute_fn"


def repeats_a_forward(owner: str) -> bool:
    """Return whether policies have met the ids of this forward, which has grad, in an earlier one.

    ``checkpoint(use_reentrant=False)`` runs a forward with grad, and the same again in backward.
    The reentrant kind runs it without grad, which only reads, and then once with grad in backward.

    Raises:
        RuntimeError: it runs inside backward, but not by torch's checkpoint.
    """
    if torch.compiler.is_compiling():
        return False
    in_backward = torch._C._current_graph_task_id() != -1
    # Recomputation keeps hooks for what is saved, also where it runs outside of backward.
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if not in_backward and not hooked:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:  # the innermost checkpoint decides where several are nested
        code = frame.f_code
        if code is _REENTRANT:
            return False
        if code.co_name == _AGAIN and code.co_filename == _FILE:
            return True
        frame = frame.f_back
    if in_backward:
        raise RuntimeError(
            f"{owner}: a training lookup inside backward that torch.utils.checkpoint did not "
            "start: whether policies have counted its ids already is unknown: use "
            "torch.utils.checkpoint, look the ids up outside of the recomputed part, or call the "
            "module in eval mode or under torch.no_grad()"
        )
    return False


__all__ = ["repeats_a_forward"]
