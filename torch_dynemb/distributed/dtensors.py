"""DTensors, without an import of their module, which takes half a second, where there are none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: Any) -> TypeIs[DTensor]:
    """Return whether a value is a DTensor; False while the module of DTensors is not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)


def whole(value: Tensor) -> Tensor:
    """Return a tensor as it is, or a DTensor of all ranks as one; collective then."""
    return value.full_tensor() if is_dtensor(value) else value


def replicated(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that all ranks of a mesh have, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


__all__ = ["is_dtensor", "replicated", "whole"]
