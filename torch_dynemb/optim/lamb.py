"""LAMB: Adam with steps scaled by the norms of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch_dynemb.optim.adam import Adam


@dataclass(frozen=True)
class LAMB(Adam):
    """Adam's direction, times the norm of the row over the norm of the direction.

    u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w;
    w -= lr * |w| / |u| * u, or lr * u where |w| or |u| is 0.

    You et al. 2020; FBGEMM's LAMB. Weight decay is part of the direction. This counts as decoupled,
    which is the default here.

    Attributes:
        decoupled_weight_decay: False: L2 is added to the gradient. The other fields are those of
            :class:`Adam`.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    decoupled_weight_decay: bool = field(default=True, kw_only=True)

    kernel_name: ClassVar[str] = "lamb"


@dataclass(frozen=True)
class PartialRowWiseLAMB(LAMB):
    """LAMB with one second moment per row, of mean(g^2) over the row.

    FBGEMM's PARTIAL_ROWWISE_LAMB. Arguments and errors are those of :class:`LAMB`.
    """

    kernel_name: ClassVar[str] = "partial_rowwise_lamb"
    element_state: ClassVar[tuple[str, ...]] = ("exp_avg",)
    row_state: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)


__all__ = ["LAMB", "PartialRowWiseLAMB"]
