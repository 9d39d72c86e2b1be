"""Which optimizer updates the rows, and its hyper-parameters.

Only rows touched by a batch move; bias corrections count the steps of the table, as in
``torch.optim.SparseAdam``. Arithmetic and state are fp32. g is the sum of the gradients of all
occurrences of an id in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch_dynemb.ops.columns import HYPER_COLUMNS, Hyper


@dataclass(frozen=True)
class StateTensor:
    """One tensor of optimizer state: a value per weight, or one per row."""

    name: str
    per_row: bool = False


@dataclass(frozen=True)
class OptimizerConfig:
    """Base of the optimizer configs.

    Attributes:
        op_name: the optimizer's name in ``torch.ops.dynemb``.
        state: its state tensors.
        hyper_columns: param-group entry -> columns of ``hyper``.
    """

    op_name: ClassVar[str]
    state: ClassVar[tuple[StateTensor, ...]]
    hyper_columns: ClassVar[dict[str, tuple[Hyper, ...]]]

    def hyper(self) -> dict[str, float | tuple[float, ...]]:
        """Param-group entries with their values."""
        return {name: getattr(self, name) for name in self.hyper_columns}

    def hyper_row(self) -> list[float]:
        """The row of ``hyper`` for a table with this config."""
        row = [0.0] * HYPER_COLUMNS
        for name, columns in self.hyper_columns.items():
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            for column, x in zip(columns, values, strict=True):
                row[column] = float(x)
        return row

    def _check(self, name: str, valid: bool, expected: str) -> None:
        if not valid:
            raise ValueError(
                f"{type(self).__name__}: {name} is {getattr(self, name)!r}, expected {expected}"
            )

    def _check_non_negative(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._check(name, math.isfinite(value) and value >= 0, "a finite number of at least 0")


@dataclass(frozen=True)
class SGD(OptimizerConfig):
    """w -= lr * (g + weight_decay * w)."""

    lr: float
    weight_decay: float = 0.0

    op_name: ClassVar[str] = "sgd"
    state: ClassVar[tuple[StateTensor, ...]] = ()
    hyper_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "lr": (Hyper.LR,),
        "weight_decay": (Hyper.WEIGHT_DECAY,),
    }

    def __post_init__(self) -> None:
        self._check_non_negative("lr", "weight_decay")


@dataclass(frozen=True)
class MomentumSGD(OptimizerConfig):
    """v = momentum * v + g; w -= lr * v, or lr * (g + momentum * v) with nesterov.

    Polyak 1964, Sutskever et al. 2013; torch.optim.SGD without dampening. weight_decay is L2, added
    to g. A row's v decays in the steps that touch it only.
    """

    lr: float
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    op_name: ClassVar[str] = "momentum_sgd"
    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("momentum_buffer"),)
    hyper_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "lr": (Hyper.LR,),
        "momentum": (Hyper.MOMENTUM,),
        "nesterov": (Hyper.NESTEROV,),
        "weight_decay": (Hyper.WEIGHT_DECAY,),
    }

    def __post_init__(self) -> None:
        self._check_non_negative("lr", "weight_decay")
        self._check("momentum", 0 <= self.momentum < 1, "a number in [0, 1)")
        self._check("nesterov", isinstance(self.nesterov, bool), "True or False")
        self._check("momentum", self.momentum > 0 or not self.nesterov, "more than 0 with nesterov")


@dataclass(frozen=True)
class Adagrad(OptimizerConfig):
    """s += g^2; w -= lr * g / (sqrt(s) + eps), with g += weight_decay * w before.

    Duchi, Hazan, Singer 2011; as torch.optim.Adagrad without lr_decay.
    """

    lr: float
    eps: float = 1e-10
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0

    op_name: ClassVar[str] = "adagrad"
    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("sum"),)
    hyper_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "lr": (Hyper.LR,),
        "eps": (Hyper.EPS,),
        "weight_decay": (Hyper.WEIGHT_DECAY,),
        "initial_accumulator_value": (Hyper.INITIAL_STATE,),
    }

    def __post_init__(self) -> None:
        self._check_non_negative("lr", "eps", "weight_decay", "initial_accumulator_value")


@dataclass(frozen=True)
class RowWiseAdagrad(OptimizerConfig):
    """s += mean(g^2) over the row; w -= lr * g / (sqrt(s) + eps): one state value per row.

    Gupta, Bennett, Weston 2014; FBGEMM's EXACT_ROWWISE_ADAGRAD.
    """

    lr: float
    eps: float = 1e-8
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0

    op_name: ClassVar[str] = "rowwise_adagrad"
    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("sum", per_row=True),)
    hyper_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = Adagrad.hyper_columns

    def __post_init__(self) -> None:
        self._check_non_negative("lr", "eps", "weight_decay", "initial_accumulator_value")


@dataclass(frozen=True)
class Adam(OptimizerConfig):
    """m, v moments of g; w -= lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).

    Kingma, Ba 2015; weight_decay is L2, added to g. t counts the update calls of the table.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    op_name: ClassVar[str] = "adam"
    state: ClassVar[tuple[StateTensor, ...]] = (
        StateTensor("exp_avg"),
        StateTensor("exp_avg_sq"),
    )
    hyper_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "lr": (Hyper.LR,),
        "betas": (Hyper.BETA1, Hyper.BETA2),
        "eps": (Hyper.EPS,),
        "weight_decay": (Hyper.WEIGHT_DECAY,),
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        self._check_non_negative("lr", "eps", "weight_decay")
        self._check(
            "betas",
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "two numbers in [0, 1)",
        )


@dataclass(frozen=True)
class AMSGrad(Adam):
    """Adam with the largest v so far in place of v.

    Reddi, Kale, Kumar 2018; torch.optim.Adam(amsgrad=True).
    """

    op_name: ClassVar[str] = "amsgrad"
    state: ClassVar[tuple[StateTensor, ...]] = (
        *Adam.state,
        StateTensor("max_exp_avg_sq"),
    )


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay of the touched rows: w -= lr * weight_decay * w first.

    Loshchilov, Hutter 2019.
    """

    weight_decay: float = 1e-2

    op_name: ClassVar[str] = "adamw"


@dataclass(frozen=True)
class AdamWTF(AdamW):
    """AdamW in TensorFlow's form: w -= lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps).

    The "epsilon hat" of Kingma, Ba 2015, section 2: eps is not multiplied by the correction of v.
    """

    op_name: ClassVar[str] = "adamw_tf"
