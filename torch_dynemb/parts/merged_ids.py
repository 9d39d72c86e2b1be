"""Ids of a checkpoint that later changes do not replace."""

from __future__ import annotations

import torch
from torch import Tensor


def outside(ids: Tensor, ascending: Tensor) -> Tensor:
    """Return which ids are not in a sorted list, bool [n].

    Args:
        ids: int64 [n].
        ascending: int64 [m].
    """
    if ascending.numel() == 0:
        return torch.ones_like(ids, dtype=torch.bool)
    places = torch.searchsorted(ascending, ids).clamp_(max=ascending.numel() - 1)
    return ascending[places] != ids


__all__ = ["outside"]
