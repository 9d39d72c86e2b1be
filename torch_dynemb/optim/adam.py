"""Adam and its relatives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from torch_dynemb.argument_checks import described, number
from torch_dynemb.ops.columns import DECAY_BY_ITSELF, Hyper
from torch_dynemb.optim.base import OptimizerConfig


@dataclass(frozen=True)
class Adam(OptimizerConfig):
    """m, v moments of g; w -= lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).

    Kingma, Ba 2015. t counts the update calls of the table, or, with ``row_steps``, of the row.

    Attributes:
        lr: learning rate, at least 0.
        betas: b1 and b2, each in [0, 1).
        eps: at least 0.
        row_steps: True: t is counted per row (int32 ``step``), so a rare row gets the bias
            correction of a new one.
        state_dtype: of m and v: float32, bfloat16, or uint8. uint8 means 8-bit floats with a scale
            per 128 columns and stochastic rounding (m: 4 bits of exponent and 3 of mantissa, v: 5
            and 3). The blocks are those of Dettmers et al. 2022.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    row_steps: bool = False
    state_dtype: torch.dtype = torch.float32

    kernel_name: ClassVar[str] = "adam"
    element_state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "betas": (Hyper.BETA1, Hyper.BETA2),
        "eps": (Hyper.EPS,),
    }

    def row_steps_name(self) -> str | None:
        return "step" if self.row_steps else None

    def __post_init__(self) -> None:
        if isinstance(self.betas, str) or not isinstance(self.betas, Iterable):
            raise TypeError(f"{self.name}: betas is {described(self.betas)}, expected two numbers")
        betas = [number(f"{self.name}: betas[{i}]", b) for i, b in enumerate(self.betas)]
        object.__setattr__(self, "betas", tuple(betas))
        super().__post_init__()
        self._check_non_negative("eps")
        self._check(
            "betas",
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "two numbers in [0, 1)",
        )
        self._check("row_steps", isinstance(self.row_steps, bool), "True or False")
        self._check_state_dtype(block=True)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay of the touched rows: w -= lr * weight_decay * w first.

    Loshchilov, Hutter 2019.

    Attributes:
        weight_decay: at least 0; the other fields are those of :class:`Adam`.
        decoupled_weight_decay: False: L2 is added to the gradient, as in Adam.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    weight_decay: float = field(default=1e-2, kw_only=True)
    decoupled_weight_decay: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class AdamWTF(AdamW):
    """AdamW in TensorFlow's form: w -= lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps).

    The "epsilon hat" of Kingma, Ba 2015, section 2: eps is not multiplied by the correction of v.

    Attributes:
        decay_by_lr: False: the decoupled decay is ``w -= weight_decay * w`` for any lr, as in
            RecIS.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    decay_by_lr: bool = field(default=True, kw_only=True)

    kernel_name: ClassVar[str] = "adamw_tf"

    def hyper_row(self) -> list[float]:
        row = super().hyper_row()
        if self.decoupled_weight_decay and not self.decay_by_lr:
            row[Hyper.DECOUPLED] = DECAY_BY_ITSELF
        return row

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("decay_by_lr", isinstance(self.decay_by_lr, bool), "True or False")


@dataclass(frozen=True)
class AMSGrad(Adam):
    """Adam with the largest v so far in place of v.

    Reddi, Kale, Kumar 2018; torch.optim.Adam(amsgrad=True). Arguments and errors are those of
    :class:`Adam`.
    """

    kernel_name: ClassVar[str] = "amsgrad"
    element_state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True)
class SmartDecayAdam(Adam):
    """Adam with updates that make up for the k - 1 steps since a row's last update.

    m' = b1^k * m + (1 - b1) * g; v' = b2^k * v + (1 - b2) * g^2;
    w -= lr / (1 - b1^t) * (m' + (b1 + ... + b1^(k - 1)) * m) / (sqrt(v' / (1 - b2^t)) + eps).

    Caffe2's and OneFlow's smart_decay_sparse_adam. The state has the step of a row's last update
    (int32 ``last_step``). Arguments are those of :class:`Adam`.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range, or ``row_steps`` is
            True.
    """

    kernel_name: ClassVar[str] = "smart_decay_adam"

    def row_steps_name(self) -> str | None:
        return "last_step"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("row_steps", not self.row_steps, "False: it decays by the table's steps")


@dataclass(frozen=True)
class PartialRowWiseAdam(Adam):
    """Adam with one second moment per row, of mean(g^2) over the row.

    FBGEMM's PARTIAL_ROWWISE_ADAM. Arguments and errors are those of :class:`Adam`.
    """

    kernel_name: ClassVar[str] = "partial_rowwise_adam"
    element_state: ClassVar[tuple[str, ...]] = ("exp_avg",)
    row_state: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)


__all__ = ["AMSGrad", "Adam", "AdamW", "AdamWTF", "PartialRowWiseAdam", "SmartDecayAdam"]
