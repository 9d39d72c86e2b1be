"""Stochastic gradient descent, also with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torch_dynemb.ops.columns import Hyper
from torch_dynemb.optim.base import OptimizerConfig


@dataclass(frozen=True)
class SGD(OptimizerConfig):
    """w -= lr * g.

    Attributes:
        lr: learning rate, at least 0.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    lr: float = 1e-3

    kernel_name: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class MomentumSGD(OptimizerConfig):
    """v = momentum * v + (1 - dampening) * g; w -= lr * v, with nesterov lr * (g + momentum * v).

    Polyak 1964, Sutskever et al. 2013; torch.optim.SGD. As there, the first g of a row is not
    dampened: g enters wherever v is 0. A row's v decays only in steps that touch the row.

    Attributes:
        lr: learning rate, at least 0.
        momentum: in [0, 1).
        nesterov: look ahead along v; needs a momentum above 0 and no dampening.
        state_dtype: of v: float32 or bfloat16.
        dampening: in [0, 1].

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    lr: float = 1e-3
    momentum: float = 0.9
    nesterov: bool = False
    state_dtype: torch.dtype = torch.float32
    dampening: float = 0.0

    kernel_name: ClassVar[str] = "momentum_sgd"
    element_state: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "momentum": (Hyper.MOMENTUM,),
        "nesterov": (Hyper.NESTEROV,),
        "dampening": (Hyper.BETA1,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_share("momentum")
        self._check("nesterov", isinstance(self.nesterov, bool), "True or False")
        self._check("momentum", self.momentum > 0 or not self.nesterov, "more than 0 with nesterov")
        self._check_non_negative("dampening")
        self._check("dampening", self.dampening <= 1, "a number in [0, 1]")
        self._check("dampening", self.dampening == 0 or not self.nesterov, "0 with nesterov")
        self._check_state_dtype(block=False)


@dataclass(frozen=True)
class LARSSGD(OptimizerConfig):
    """SGD with momentum and a learning rate that follows the norms of the row.

    rate = lr * trust_coefficient * |w| / (|g| + weight_decay * |w|), or lr where |w| or |g| is 0;
    v = momentum * v + rate * (g + weight_decay * w); w -= v.

    With decoupled weight decay, rate and v have no weight_decay. Touched rows first decay by lr,
    not by rate: w = (1 - lr * weight_decay) * w - v. |w| is the norm before that.

    You, Gitman, Ginsburg 2017; FBGEMM's LARS_SGD.

    Attributes:
        lr: learning rate, at least 0.
        momentum: in [0, 1).
        trust_coefficient: at least 0.
        state_dtype: of v: float32 or bfloat16.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    lr: float = 1e-3
    momentum: float = 0.9
    trust_coefficient: float = 1e-3
    state_dtype: torch.dtype = torch.float32

    kernel_name: ClassVar[str] = "lars_sgd"
    element_state: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "momentum": (Hyper.MOMENTUM,),
        "trust_coefficient": (Hyper.TRUST,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_share("momentum")
        self._check_non_negative("trust_coefficient")
        self._check_state_dtype(block=False)


__all__ = ["LARSSGD", "SGD", "MomentumSGD"]
