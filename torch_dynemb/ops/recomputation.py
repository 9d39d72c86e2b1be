"""Ops that a selective activation checkpoint must not run a second time."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, _CachingTorchDispatchMode


def always_saved(name: str) -> None:
    """Make selective checkpointing save the outputs of an op, whatever its policy says.

    Compiled code checkpoints that way too. An op that changes the index would copy it if it were
    repeated in a compiled backward: the index is changed in the forward only.

    Args:
        name: of the op, without its namespace.
    """
    torch.library.register_torch_dispatch(f"dynemb::{name}", _CachingTorchDispatchMode, _saved)


def _saved(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    policy = mode.policy_fn
    mode.policy_fn = lambda *_args, **_kwargs: CheckpointPolicy.MUST_SAVE
    try:
        return mode.__torch_dispatch__(func, types, args, kwargs)
    finally:
        mode.policy_fn = policy


__all__ = ["always_saved"]
