"""Which optimizer updates the rows, and its hyper-parameters.

Only rows touched by a batch move, and bias corrections count the steps of the table, as in
``torch.optim.SparseAdam``. Arithmetic is fp32. g is the sum of the gradients of all occurrences of
an id in the batch; ``weight_decay * w`` has been added to it unless weight decay is decoupled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, number
from torch_dynemb.ops.columns import DECAY_BY_ITSELF, HYPER_COLUMNS, Hyper, NonFinite

_NON_FINITE = {
    "propagate": NonFinite.PROPAGATE,
    "skip": NonFinite.SKIP,
    "raise": NonFinite.RAISE,
}
# The numbers of all configs.
_NUMBERS = (
    *("lr", "weight_decay", "clip_value", "clip_norm", "momentum", "trust_coefficient", "eps"),
    *("l1", "l2", "beta", "initial_accumulator_value", "group_l1"),
)
DelayedGradients = Literal["raise", "apply"]
DELAYED_GRADIENTS = ("raise", "apply")
_BLOCK_COLUMNS = 128  # columns of a row that share a scale, in 8-bit state


@dataclass(frozen=True)
class StateTensor:
    """One tensor of optimizer state: a value per weight, or one per row.

    Attributes:
        name: as torch.optim names it, where it does.
        per_row: [rows] instead of [rows, dim].
        dtype: of its values; uint8 holds 8-bit floats with a float32 scale per 128 of them.
    """

    name: str
    per_row: bool = False
    dtype: torch.dtype = torch.float32

    def columns(self, dim: int) -> int:
        """Elements of a row's entry."""
        if self.per_row:
            return 1
        if self.dtype == torch.uint8:
            return -(-dim // 4) * 4 + 4 * -(-dim // _BLOCK_COLUMNS)
        return dim

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row's entry."""
        return self.columns(dim) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Base of the optimizer configs: what all of them can do.

    Attributes:
        lr: learning rate; a tensor gives its value.
        weight_decay: L2: added to the gradient as ``weight_decay * w``.
        decoupled_weight_decay: it shrinks the weight instead, ``w -= lr * weight_decay * w``, as in
            AdamW (Loshchilov, Hutter 2019); touched rows only.
        clip_value: elements of g are cut off at plus and minus this.
        clip_norm: g of a row is scaled down to this L2 norm. For one norm over all parameters, see
            :func:`torch_dynemb.clip_grad_norm_`.
        non_finite: rows whose gradient has NaN or infinity are updated with it (``"propagate"``),
            left alone and counted (``"skip"``, see ``optimizer.non_finite_gradients()``), or
            nothing is updated and an error raised (``"raise"``; on a GPU in ``step()``).
        delayed_gradients: what becomes of gradients whose rows others have updated between the
            forward and the backward. ``"raise"``: an error, because they were computed from rows
            that are no more. ``"apply"``: they update the rows as they are by then, as asynchronous
            and semi-synchronous training does (delayed SGD: Langford et al. 2009); each backward is
            an update of its own, also a second one of the same lookup. Gradients of ids whose row
            another id has by then are dropped and counted in any case
            (``group.stale_gradients()``). In split mode this is about the gradients of
            per_sample_weights, which read the rows: others wait for ``step()`` anyway.
        stochastic_rounding: of rows, and state, of less than float32: up or down with the
            probability of the remainder, else to nearest. Reproducible: the random bits are a
            function of seed, id, step and column.

    Configs that keep a value per weight also take ``state_dtype``, float32 or bfloat16 (the Adam
    family also uint8, see :class:`Adam`); a value per row is float32 always.
    """

    lr: float
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    clip_value: float | None = None
    clip_norm: float | None = None
    non_finite: Literal["propagate", "skip", "raise"] = "propagate"
    delayed_gradients: DelayedGradients = "raise"
    stochastic_rounding: bool = True

    op_name: ClassVar[str]
    element_state: ClassVar[tuple[str, ...]] = ()
    row_state: ClassVar[tuple[str, ...]] = ()
    common_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "lr": (Hyper.LR,),
        "weight_decay": (Hyper.WEIGHT_DECAY,),
        "clip_value": (Hyper.CLIP_VALUE,),
        "clip_norm": (Hyper.CLIP_NORM,),
    }
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {}

    @property
    def name(self) -> str:
        """The optimizer's name in saved states."""
        return type(self).__name__

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """Its state tensors: per weight, then per row."""
        dtype = getattr(self, "state_dtype", torch.float32)
        tensors = [StateTensor(name, dtype=dtype) for name in self.element_state]
        tensors += [StateTensor(name, per_row=True) for name in self.row_state]
        steps = self.row_steps_name()
        if steps is not None:
            tensors.append(StateTensor(steps, per_row=True, dtype=torch.int32))
        return tuple(tensors)

    def row_steps_name(self) -> str | None:
        """The int32 state tensor that counts steps by row, if there is one."""
        return None

    @property
    def hyper_columns(self) -> dict[str, tuple[Hyper, ...]]:
        """Param-group entry -> columns of ``hyper``."""
        return {**self.common_columns, **self.own_columns}

    def hyper(self) -> dict[str, float | tuple[float, ...] | None]:
        """Param-group entries with their values."""
        return {name: getattr(self, name) for name in self.hyper_columns}

    def hyper_row(self) -> list[float]:
        """The row of ``hyper`` for a table with this config."""
        row = [0.0] * HYPER_COLUMNS
        row[Hyper.DOWN_SCALE_BY] = 1.0
        row[Hyper.DECOUPLED] = float(self.decoupled_weight_decay)
        row[Hyper.NON_FINITE] = float(_NON_FINITE[self.non_finite])
        row[Hyper.STOCHASTIC] = float(self.stochastic_rounding)
        for name, columns in self.hyper_columns.items():
            for column, x in zip(columns, hyper_values(name, getattr(self, name)), strict=True):
                row[column] = x
        return row

    def description(self) -> dict[str, Any]:
        """What a saved state must have been written with: optimizer and state tensors."""
        return {
            "name": self.name,
            "state": [[t.name, t.per_row, str(t.dtype).removeprefix("torch.")] for t in self.state],
        }

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise ValueError(
                        f"{self.name}: {entry.name} is a tensor of shape {tuple(value.shape)}, "
                        "expected one number"
                    )
                object.__setattr__(self, entry.name, float(value))
        for name in _NUMBERS:
            if getattr(self, name, None) is not None:
                number(f"{self.name}: {name}", getattr(self, name))
        self._check_non_negative("lr", "weight_decay")
        for name in ("decoupled_weight_decay", "stochastic_rounding"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        for name in ("clip_value", "clip_norm"):
            limit = getattr(self, name)
            self._check(name, limit is None or limit > 0, "a number above 0, or None")
        self._check("non_finite", self.non_finite in _NON_FINITE, f"one of {list(_NON_FINITE)}")
        delayed = self.delayed_gradients
        self._check(
            "delayed_gradients", delayed in DELAYED_GRADIENTS, f"one of {DELAYED_GRADIENTS}"
        )

    def _check(self, name: str, valid: bool, expected: str) -> None:
        if not valid:
            raise ValueError(f"{self.name}: {name} is {getattr(self, name)!r}, expected {expected}")

    def _check_non_negative(self, *names: str) -> None:
        for name in names:
            value = number(f"{self.name}: {name}", getattr(self, name))
            self._check(name, math.isfinite(value) and value >= 0, "a finite number of at least 0")

    def _check_state_dtype(self, *, block: bool) -> None:
        allowed = [torch.float32, torch.bfloat16, *([torch.uint8] if block else [])]
        self._check(
            "state_dtype", getattr(self, "state_dtype", None) in allowed, f"one of {allowed}"
        )

    def _check_momentum(self) -> None:
        momentum = number(f"{self.name}: momentum", getattr(self, "momentum", 0.0))
        self._check("momentum", 0 <= momentum < 1, "a number in [0, 1)")


def hyper_values(name: str, value: Any) -> list[float]:
    """A param-group entry as numbers; None of a clip is no limit.

    Raises:
        ValueError: None for anything else.
    """
    if value is None:
        if name not in ("clip_value", "clip_norm"):
            raise ValueError(f"param group: {name} is None, expected a number")
        return [math.inf]
    values = value if isinstance(value, tuple | list) else (value,)
    return [float(x) if isinstance(x, bool) else number(f"param group: {name}", x) for x in values]


@dataclass(frozen=True)
class SGD(OptimizerConfig):
    """w -= lr * g."""

    lr: float

    op_name: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class MomentumSGD(OptimizerConfig):
    """v = momentum * v + g; w -= lr * v, or lr * (g + momentum * v) with nesterov.

    Polyak 1964, Sutskever et al. 2013; torch.optim.SGD without dampening. A row's v decays in the
    steps that touch it only.
    """

    lr: float
    momentum: float = 0.9
    nesterov: bool = False
    state_dtype: torch.dtype = torch.float32

    op_name: ClassVar[str] = "momentum_sgd"
    element_state: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "momentum": (Hyper.MOMENTUM,),
        "nesterov": (Hyper.NESTEROV,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_momentum()
        self._check("nesterov", isinstance(self.nesterov, bool), "True or False")
        self._check("momentum", self.momentum > 0 or not self.nesterov, "more than 0 with nesterov")
        self._check_state_dtype(block=False)


@dataclass(frozen=True)
class LARSSGD(OptimizerConfig):
    """SGD with momentum whose rate follows the norms of the row.

    rate = lr * trust_coefficient * |w| / (|g| + weight_decay * |w|), or lr where |w| or |g| is 0;
    v = momentum * v + rate * (g + weight_decay * w); w -= v.

    You, Gitman, Ginsburg 2017; FBGEMM's LARS_SGD.
    """

    lr: float
    momentum: float = 0.9
    trust_coefficient: float = 1e-3
    state_dtype: torch.dtype = torch.float32

    op_name: ClassVar[str] = "lars_sgd"
    element_state: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "momentum": (Hyper.MOMENTUM,),
        "trust_coefficient": (Hyper.TRUST,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_momentum()
        self._check_non_negative("trust_coefficient")
        self._check_state_dtype(block=False)


@dataclass(frozen=True)
class Adagrad(OptimizerConfig):
    """s += g^2; w -= lr * g / (sqrt(s) + eps).

    Duchi, Hazan, Singer 2011; as torch.optim.Adagrad without lr_decay.
    """

    lr: float
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    state_dtype: torch.dtype = torch.float32

    op_name: ClassVar[str] = "adagrad"
    element_state: ClassVar[tuple[str, ...]] = ("sum",)
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "eps": (Hyper.EPS,),
        "initial_accumulator_value": (Hyper.INITIAL_STATE,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_non_negative("eps", "initial_accumulator_value")
        self._check_state_dtype(block=False)


@dataclass(frozen=True)
class RowWiseAdagrad(OptimizerConfig):
    """s += mean(g^2) over the row; w -= lr * g / (sqrt(s) + eps): one state value per row.

    Gupta, Bennett, Weston 2014; FBGEMM's EXACT_ROWWISE_ADAGRAD.
    """

    lr: float
    eps: float = 1e-8
    initial_accumulator_value: float = 0.0

    op_name: ClassVar[str] = "rowwise_adagrad"
    row_state: ClassVar[tuple[str, ...]] = ("sum",)
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = Adagrad.own_columns

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_non_negative("eps", "initial_accumulator_value")


@dataclass(frozen=True)
class Ftrl(OptimizerConfig):
    """FTRL-Proximal: sparse weights.

    s' = s + g^2; z += g - (sqrt(s') - sqrt(s)) / lr * w;
    w = 0 where |z| <= l1, else (sign(z) * l1 - z) / ((beta + sqrt(s')) / lr + l2).

    McMahan et al. 2013, algorithm 1; TensorFlow's Ftrl with learning_rate_power -0.5 and half its
    l2. A row's weights follow from z and s alone: its initial value is forgotten as s grows.
    """

    lr: float
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1
    state_dtype: torch.dtype = torch.float32

    op_name: ClassVar[str] = "ftrl"
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
    """FTRL with a penalty on the row as a group: rows that do not matter become zero.

    u = what Ftrl shrinks z to, sign(z) * l1 - z or 0; w = 0 if |u| <= group_l1 * sqrt(dim), else
    (1 - group_l1 * sqrt(dim) / |u|) * u / ((beta + sqrt(s')) / lr + l2).

    Ni et al. 2021, "Adaptive optimizers with sparse group lasso for neural networks in CTR
    prediction".
    """

    group_l1: float = 0.0

    op_name: ClassVar[str] = "group_ftrl"
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        **Ftrl.own_columns,
        "group_l1": (Hyper.GROUP,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_non_negative("group_l1")


@dataclass(frozen=True)
class Adam(OptimizerConfig):
    """m, v moments of g; w -= lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).

    Kingma, Ba 2015. t counts the update calls of the table, or, with ``row_steps``, of the row.

    Attributes:
        row_steps: keep a step count per row (int32 ``step``): a rare row is corrected like a young
            one.
        state_dtype: of m and v: float32, bfloat16, or uint8 for 8-bit floats with a scale per 128
            columns, stochastically rounded (m: 4 bits of exponent and 3 of mantissa, v: 5 and 3;
            the blocks are those of Dettmers et al. 2022).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    row_steps: bool = False
    state_dtype: torch.dtype = torch.float32

    op_name: ClassVar[str] = "adam"
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
    """

    weight_decay: float = field(default=1e-2, kw_only=True)
    decoupled_weight_decay: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class AdamWTF(AdamW):
    """AdamW in TensorFlow's form: w -= lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps).

    The "epsilon hat" of Kingma, Ba 2015, section 2: eps is not multiplied by the correction of v.

    Attributes:
        decay_by_lr: False: the decoupled decay is ``w -= weight_decay * w``, whatever lr is, as in
            RecIS.
    """

    decay_by_lr: bool = field(default=True, kw_only=True)

    op_name: ClassVar[str] = "adamw_tf"

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

    Reddi, Kale, Kumar 2018; torch.optim.Adam(amsgrad=True).
    """

    op_name: ClassVar[str] = "amsgrad"
    element_state: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True)
class SmartDecayAdam(Adam):
    """Adam whose rows catch up with the k - 1 steps since they were last touched.

    m' = b1^k * m + (1 - b1) * g; v' = b2^k * v + (1 - b2) * g^2;
    w -= lr / (1 - b1^t) * (m' + (b1 + ... + b1^(k - 1)) * m) / (sqrt(v' / (1 - b2^t)) + eps).

    Caffe2's and OneFlow's smart_decay_sparse_adam. Keeps the step of a row's last update (int32
    ``last_step``).
    """

    op_name: ClassVar[str] = "smart_decay_adam"

    def row_steps_name(self) -> str | None:
        return "last_step"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("row_steps", not self.row_steps, "False: it decays by the table's steps")


@dataclass(frozen=True)
class PartialRowWiseAdam(Adam):
    """Adam with one second moment per row, of mean(g^2) over the row.

    FBGEMM's PARTIAL_ROWWISE_ADAM.
    """

    op_name: ClassVar[str] = "partial_rowwise_adam"
    element_state: ClassVar[tuple[str, ...]] = ("exp_avg",)
    row_state: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)


@dataclass(frozen=True)
class LAMB(Adam):
    """Adam's direction, times the norm of the row over the norm of the direction.

    u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w;
    w -= lr * |w| / |u| * u, or lr * u where |w| or |u| is 0.

    You et al. 2020; FBGEMM's LAMB. Weight decay is part of the direction: it counts as decoupled,
    which is the default here; L2 otherwise.
    """

    decoupled_weight_decay: bool = field(default=True, kw_only=True)

    op_name: ClassVar[str] = "lamb"


@dataclass(frozen=True)
class PartialRowWiseLAMB(LAMB):
    """LAMB with one second moment per row, of mean(g^2) over the row.

    FBGEMM's PARTIAL_ROWWISE_LAMB.
    """

    op_name: ClassVar[str] = "partial_rowwise_lamb"
    element_state: ClassVar[tuple[str, ...]] = ("exp_avg",)
    row_state: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
