"""A test for DTensors that does not import their module, which takes half a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: Any) -> TypeIs[DTensor]:
    """Return whether a value is a DTensor; False while the module of DTensors is not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)


__all__ = ["is_dtensor"]
