"""FTRL-Proximal, also with rows as groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torch_dynemb.ops.columns import Hyper
from torch_dynemb.optim.base import OptimizerConfig


@dataclass(frozen=True)
class Ftrl(OptimizerConfig):
    """FTRL-Proximal: sparse weights.

    s' = s + g^2; z += g - (sqrt(s') - sqrt(s)) / lr * w;
    w = 0 where |z| <= l1, else (sign(z) * l1 - z) / ((beta + sqrt(s')) / lr + l2).

    McMahan et al. 2013, algorithm 1; TensorFlow's Ftrl with learning_rate_power -0.5 and half its
    l2. A row's weights follow from z and s alone: its initial value fades as s grows.

    Decoupled weight decay follows the update of touched rows: w *= 1 - lr * weight_decay. It does
    not add up over steps, because each update computes w from z again; z sees the decayed w.

    Attributes:
        lr: learning rate, above 0.
        l1: at least 0.
        l2: at least 0.
        beta: at least 0.
        initial_accumulator_value: initial value of s, at least 0, and above 0 if beta and l2 are 0.
        state_dtype: of s and z: float32 or bfloat16.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    lr: float = 1e-3
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1
    state_dtype: torch.dtype = torch.float32

    kernel_name: ClassVar[str] = "ftrl"
    element_state: ClassVar[tuple[str, ...]] = ("sum", "linear")
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "l1": (Hyper.L1,),
        "l2": (Hyper.RIDGE,),
        "beta": (Hyper.BETA,),
        "initial_accumulator_value": (Hyper.INITIAL_STATE,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("lr", self.lr > 0, "more than 0: FTRL divides by it")
        self._check_non_negative("l1", "l2", "beta", "initial_accumulator_value")
        self._check(
            "initial_accumulator_value",
            self.initial_accumulator_value + self.beta + self.l2 > 0,
            "more than 0 where beta and l2 are 0: a row without a gradient would be 0 / 0",
        )
        self._check_state_dtype(block=False)


@dataclass(frozen=True)
class GroupFtrl(Ftrl):
    """FTRL with a penalty on each row as a group: unimportant rows become zero.

    u = sign(z) * l1 - z where |z| > l1, else 0, as in Ftrl; w = 0 if |u| <= group_l1 * sqrt(dim),
    else
    (1 - group_l1 * sqrt(dim) / |u|) * u / ((beta + sqrt(s')) / lr + l2).
    Decoupled weight decay comes after that, as in :class:`Ftrl`; |u| does not see it.

    Ni et al. 2021, "Adaptive optimizers with sparse group lasso for neural networks in CTR
    prediction".

    Attributes:
        group_l1: at least 0; the other fields are those of :class:`Ftrl`.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    group_l1: float = 0.0

    kernel_name: ClassVar[str] = "group_ftrl"
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        **Ftrl.own_columns,
        "group_l1": (Hyper.GROUP,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_non_negative("group_l1")


__all__ = ["Ftrl", "GroupFtrl"]
