"""What RecIS's arguments are to the ops: numbers and offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def words(offsets: Tensor) -> Tensor:
    """Offsets or places as int64."""
    return offsets.to(torch.int64).contiguous()


def numbers(values: Tensor | Sequence[Any]) -> list[Any]:
    """Numbers that the host reads; it waits for a GPU."""
    return values.tolist() if isinstance(values, Tensor) else list(values)


__all__ = ["numbers", "words"]
