"""What RecIS's arguments are to the ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def numbers(values: Tensor | Sequence[Any]) -> list[Any]:
    """Numbers that the host reads; it waits for a GPU."""
    return values.tolist() if isinstance(values, Tensor) else list(values)


__all__ = ["numbers"]
