"""Offsets as the ops take them."""

from __future__ import annotations

import torch
from torch import Tensor


def words(offsets: Tensor) -> Tensor:
    """Offsets or places as int64, contiguous."""
    return offsets.to(torch.int64).contiguous()


__all__ = ["words"]
