"""Adagrad, by element and by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torch_dynemb.ops.columns import Hyper
from torch_dynemb.optim.base import OptimizerConfig


@dataclass(frozen=True)
class Adagrad(OptimizerConfig):
    """s += g^2; w -= lr * g / (sqrt(s) + eps).

    Duchi, Hazan, Singer 2011; as torch.optim.Adagrad. The rate in step t of the table is
    lr / (1 + (t - 1) * lr_decay), also that of decoupled weight decay.

    Attributes:
        lr: learning rate, at least 0.
        eps: at least 0.
        initial_accumulator_value: initial value of s, at least 0.
        lr_decay: at least 0.
        state_dtype: of s: float32 or bfloat16.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    lr: float = 1e-2
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    state_dtype: torch.dtype = torch.float32
    lr_decay: float = 0.0

    kernel_name: ClassVar[str] = "adagrad"
    element_state: ClassVar[tuple[str, ...]] = ("sum",)
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "eps": (Hyper.EPS,),
        "initial_accumulator_value": (Hyper.INITIAL_STATE,),
        "lr_decay": (Hyper.LR_DECAY,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_non_negative("eps", "initial_accumulator_value", "lr_decay")
        self._check_state_dtype(block=False)


@dataclass(frozen=True)
class RowWiseAdagrad(OptimizerConfig):
    """s += mean(g^2) over the row; w -= lr * g / (sqrt(s) + eps): one state value per row.

    Gupta, Bennett, Weston 2014; FBGEMM's EXACT_ROWWISE_ADAGRAD.

    Attributes:
        lr: learning rate, at least 0.
        eps: at least 0.
        initial_accumulator_value: initial value of s, at least 0.
        lr_decay: at least 0; as in :class:`Adagrad`.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    lr: float = 1e-2
    eps: float = 1e-8
    initial_accumulator_value: float = 0.0
    lr_decay: float = 0.0

    kernel_name: ClassVar[str] = "rowwise_adagrad"
    row_state: ClassVar[tuple[str, ...]] = ("sum",)
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = Adagrad.own_columns

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_non_negative("eps", "initial_accumulator_value", "lr_decay")


__all__ = ["Adagrad", "RowWiseAdagrad"]
