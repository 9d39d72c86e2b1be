"""Conversion of offsets for the ops."""

from __future__ import annotations

import torch
from torch import Tensor


def as_int64(offsets: Tensor) -> Tensor:
    """Return offsets or positions as contiguous int64."""
    return offsets.to(torch.int64).contiguous()


__all__ = ["as_int64"]
