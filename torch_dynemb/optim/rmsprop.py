"""RMSprop, by element and by row, and Adadelta: mean squares that forget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torch_dynemb.ops.columns import Hyper
from torch_dynemb.optim.base import OptimizerConfig, StateTensor


@dataclass(frozen=True)
class RMSprop(OptimizerConfig):
    """v = alpha * v + (1 - alpha) * g^2; w -= lr * g / (sqrt(v) + eps).

    With momentum: b = momentum * b + g / (sqrt(v) + eps); w -= lr * b. Tieleman, Hinton 2012; as
    torch.optim.RMSprop with ``centered=False``. v and b of a row change only in steps that touch
    the row.

    Attributes:
        lr: learning rate, at least 0.
        alpha: in [0, 1).
        eps: at least 0.
        momentum: in [0, 1). Above 0 a row also keeps b, and the param group has ``"momentum"``.
        state_dtype: of v and b: float32 or bfloat16.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    state_dtype: torch.dtype = torch.float32

    kernel_name: ClassVar[str] = "rmsprop"
    element_state: ClassVar[tuple[str, ...]] = ("square_avg",)
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "alpha": (Hyper.BETA2,),
        "eps": (Hyper.EPS,),
    }

    def _kernel(self) -> str:
        return f"{self.kernel_name}_momentum" if self.momentum > 0 else self.kernel_name

    @property
    def state(self) -> tuple[StateTensor, ...]:
        buffer = StateTensor("momentum_buffer", dtype=self.state_dtype)
        return (*super().state, buffer) if self.momentum > 0 else super().state

    @property
    def hyper_columns(self) -> dict[str, tuple[Hyper, ...]]:
        momentum = {"momentum": (Hyper.MOMENTUM,)} if self.momentum > 0 else {}
        return {**super().hyper_columns, **momentum}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_share("alpha", "momentum")
        self._check_non_negative("eps")
        self._check_state_dtype(block=False)


@dataclass(frozen=True)
class Adadelta(OptimizerConfig):
    """v = rho * v + (1 - rho) * g^2; u = sqrt(d + eps) / sqrt(v + eps) * g; w -= lr * u.

    d = rho * d + (1 - rho) * u^2 follows. Zeiler 2012; as torch.optim.Adadelta. v and d of a row
    change only in steps that touch the row.

    Attributes:
        lr: learning rate, at least 0.
        rho: in [0, 1).
        eps: at least 0.
        state_dtype: of v and d: float32 or bfloat16.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    state_dtype: torch.dtype = torch.float32

    kernel_name: ClassVar[str] = "adadelta"
    element_state: ClassVar[tuple[str, ...]] = ("square_avg", "acc_delta")
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "rho": (Hyper.BETA2,),
        "eps": (Hyper.EPS,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_share("rho")
        self._check_non_negative("eps")
        self._check_state_dtype(block=False)


@dataclass(frozen=True)
class RowWiseRMSprop(OptimizerConfig):
    """v = b * v + (1 - b) * mean(g^2) over the row; w = c * w - lr * g / (sqrt(v) + eps).

    c = max(min_shrinkage, 1 - min(1, lr * ar_alpha * k)) shrinks a row by the k steps of the table
    since the row's last update; k is 1 at its first. A row that was not touched for long forgets.
    With ``ar_alpha=0`` it is plain row-wise RMSprop.

    Li, Lyu 2026, "Adaptive regularization for large-scale sparse feature embedding models",
    algorithm 2; FBGEMM's ROWWISE_RMSPROP_AR. The state has v, and the step of a row's last update
    (int32 ``last_step``).

    Attributes:
        lr: learning rate, at least 0.
        ema_beta: b, in [0, 1).
        eps: at least 0.
        ar_alpha: at least 0.
        min_shrinkage: least c, in [0, 1].

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    lr: float = 1e-2
    ema_beta: float = 0.99
    eps: float = 1e-8
    ar_alpha: float = 0.0
    min_shrinkage: float = 0.1

    kernel_name: ClassVar[str] = "rowwise_rmsprop"
    row_state: ClassVar[tuple[str, ...]] = ("square_avg",)
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "ema_beta": (Hyper.BETA2,),
        "eps": (Hyper.EPS,),
        "ar_alpha": (Hyper.AR_ALPHA,),
        "min_shrinkage": (Hyper.MIN_SHRINKAGE,),
    }

    def row_steps_name(self) -> str | None:
        return "last_step"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_share("ema_beta")
        self._check_non_negative("eps", "ar_alpha", "min_shrinkage")
        self._check("min_shrinkage", self.min_shrinkage <= 1, "a number in [0, 1]")


__all__ = ["Adadelta", "RMSprop", "RowWiseRMSprop"]
