"""Whether a tensor is a DTensor, without the half second that it takes to import DTensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: Any) -> TypeIs[DTensor]:
    """Whether a value is a DTensor: there are none before somebody has imported their module."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)


__all__ = ["is_dtensor"]
