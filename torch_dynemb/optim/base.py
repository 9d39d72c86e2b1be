"""Configs of optimizers: the base of all, and the state tensors.

Only rows touched by a batch move. Bias corrections count the steps of the table, as in
``torch.optim.SparseAdam``. Arithmetic is fp32. g is the sum of the gradients of all occurrences of
an id in the batch. Unless weight decay is decoupled, g includes ``weight_decay * w``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, number
from torch_dynemb.ops.columns import HYPER_COLUMNS, Hyper, NonFinite
from torch_dynemb.ops.update import OPTIMIZER_NAMES

_NON_FINITE = {
    "propagate": NonFinite.PROPAGATE,
    "skip": NonFinite.SKIP,
    "raise": NonFinite.RAISE,
}
DelayedGradients = Literal["raise", "apply"]
DELAYED_GRADIENTS = ("raise", "apply")
# Entries of a param group that older state dicts lack, with the value that they stood for.
LATER_ENTRIES = {"maximize": False, "dampening": 0.0, "lr_decay": 0.0}
_BLOCK_COLUMNS = 128  # columns of a row that share a scale, in 8-bit state


@dataclass(frozen=True)
class StateTensor:
    """One tensor of optimizer state: a value per weight, or one per row.

    Attributes:
        name: that of torch.optim, if torch has such a tensor.
        per_row: [rows] instead of [rows, dim].
        dtype: of its values; uint8: 8-bit floats with a float32 scale per 128 of them.
    """

    name: str
    per_row: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def splits_by_column(self) -> bool:
        """Whether some columns of a row have the same columns of its entry."""
        return not self.per_row and self.dtype != torch.uint8

    def columns(self, dim: int) -> int:
        """Return the number of elements of a row's entry."""
        if self.per_row:
            return 1
        if self.dtype == torch.uint8:
            return -(-dim // 4) * 4 + 4 * -(-dim // _BLOCK_COLUMNS)
        return dim

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of a row's entry."""
        return self.columns(dim) * self.dtype.itemsize


def check_config(owner: str, value: object) -> OptimizerConfig:
    """Return ``value``, which must be an optimizer config.

    Args:
        owner: function and argument, with which the error begins.
        value: of the argument.

    Raises:
        TypeError: it is something else; the message suggests the config of the same name, if one
            exists.
    """
    if isinstance(value, OptimizerConfig):
        return value
    named = value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)
    wanted = named.lower().replace("_", "").removeprefix("sparse").removeprefix("exact")
    alike = [config for config in _configs(OptimizerConfig) if config.__name__.lower() == wanted]
    example = f"{alike[0].__name__}()" if alike else "Adam(lr=1e-3)"
    raise TypeError(
        f"{owner} is {described(value)}, expected a config such as torch_dynemb.{example}: "
        "optimizers of torch cannot update rows"
    )


def _configs(base: type[OptimizerConfig]) -> list[type[OptimizerConfig]]:
    below = [config for child in base.__subclasses__() for config in _configs(child)]
    return [*base.__subclasses__(), *below]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Base of the optimizer configs: settings that all of them have.

    Attributes:
        lr: learning rate, at least 0; a tensor gives its value. Defaults are those of torch.optim
            (SGD and the Adam family 1e-3, Adagrad and RMSprop 1e-2, Adadelta 1) and of TensorFlow's
            Ftrl (1e-3).
        weight_decay: at least 0. L2: added to the gradient as ``weight_decay * w``.
        decoupled_weight_decay: True: shrink the weights of touched rows instead, by
            ``w -= lr * weight_decay * w``, as in AdamW (Loshchilov, Hutter 2019).
        clip_value: elements of g are clipped to plus and minus this, a number above 0.
        clip_norm: g of a row is scaled down to this L2 norm, a number above 0. For one norm over
            all parameters, see :func:`torch_dynemb.clip_grad_norm_`.
        non_finite: treatment of rows if their gradient has NaN or infinity. ``"propagate"``: update
            them with it. ``"skip"``: leave them alone and count them, see
            ``optimizer.non_finite_gradients()``. ``"raise"``: update nothing and raise; on a GPU in
            ``step()``.
        delayed_gradients: treatment of gradients if their rows were updated between forward and
            backward. ``"raise"``: an error, because they were computed from old values of the rows.
            ``"apply"``: they update the rows, as in asynchronous and semi-synchronous training
            (delayed SGD: Langford et al. 2009). Each backward is a separate update, also a second
            one of the same lookup. In any case a gradient is dropped and counted if its row has
            passed to another id (``group.usage.stale_gradients()``). In split mode, only gradients
            of per_sample_weights read the rows and are concerned; others are pending until
            ``step()`` anyway.
        stochastic_rounding: of rows and state of less than float32. True: up or down with the
            probability of the remainder; False: to nearest. Reproducible: the random bits are a
            function of seed, id, step and column.
        maximize: True: g is negated first, so that rows move up the gradient, as in torch.optim.

    Configs with a value per weight also take ``state_dtype``, float32 or bfloat16 (the Adam family
    also uint8, see :class:`Adam`). A value per row is always float32.

    Raises:
        TypeError, ValueError: a value is not a number, or out of its range.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    clip_value: float | None = None
    clip_norm: float | None = None
    non_finite: Literal["propagate", "skip", "raise"] = "propagate"
    delayed_gradients: DelayedGradients = "raise"
    stochastic_rounding: bool = True
    maximize: bool = False

    kernel_name: ClassVar[str]
    element_state: ClassVar[tuple[str, ...]] = ()
    row_state: ClassVar[tuple[str, ...]] = ()
    common_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {
        "lr": (Hyper.LR,),
        "weight_decay": (Hyper.WEIGHT_DECAY,),
        "clip_value": (Hyper.CLIP_VALUE,),
        "clip_norm": (Hyper.CLIP_NORM,),
        "maximize": (Hyper.MAXIMIZE,),
    }
    own_columns: ClassVar[dict[str, tuple[Hyper, ...]]] = {}

    @property
    def kernel_number(self) -> int:
        """Position in :data:`torch_dynemb.ops.OPTIMIZER_NAMES`, which ops take."""
        return OPTIMIZER_NAMES.index(self._kernel())

    def _kernel(self) -> str:
        return self.kernel_name

    @property
    def name(self) -> str:
        """The optimizer's name in saved states."""
        return type(self).__name__

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """State tensors: per weight, then per row."""
        dtype = getattr(self, "state_dtype", torch.float32)
        tensors = [StateTensor(name, dtype=dtype) for name in self.element_state]
        tensors += [StateTensor(name, per_row=True) for name in self.row_state]
        steps = self.row_steps_name()
        if steps is not None:
            tensors.append(StateTensor(steps, per_row=True, dtype=torch.int32))
        return tuple(tensors)

    def row_steps_name(self) -> str | None:
        """Return the name of the int32 state tensor that counts steps per row, or None."""
        return None

    @property
    def hyper_columns(self) -> dict[str, tuple[Hyper, ...]]:
        """Columns of ``hyper`` by entry of a param group."""
        return {**self.common_columns, **self.own_columns}

    def hyper(self) -> dict[str, float | tuple[float, ...] | None]:
        """Return the entries of a param group with their values."""
        return {name: getattr(self, name) for name in self.hyper_columns}

    def hyper_row(self) -> list[float]:
        """Return the row of ``hyper`` for a table with this config.

        Raises:
            ValueError: a subclass has an option that is None.
        """
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
        """Return the optimizer and state tensors that a saved state must have been written with."""
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
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type in ("float", "float | None") and value is not None:
                number(f"{self.name}: {entry.name}", value)
        self._check_non_negative("lr", "weight_decay")
        for name in ("decoupled_weight_decay", "stochastic_rounding", "maximize"):
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

    def _check_share(self, *names: str) -> None:
        for name in names:
            share = number(f"{self.name}: {name}", getattr(self, name))
            self._check(name, 0 <= share < 1, "a number in [0, 1)")


def hyper_values(name: str, value: Any) -> list[float]:
    """Return a param-group entry as numbers; a clip of None becomes infinity.

    Raises:
        ValueError: another entry is None.
    """
    if value is None:
        if name not in ("clip_value", "clip_norm"):
            raise ValueError(f"param group: {name} is None, expected a number")
        return [math.inf]
    values = value if isinstance(value, tuple | list) else (value,)
    return [float(x) if isinstance(x, bool) else number(f"param group: {name}", x) for x in values]


def plain_value(value: Any) -> Any:
    """Return a param-group entry as numbers of its own: a tensor gives its value."""
    if isinstance(value, tuple | list):
        return tuple(plain_value(x) for x in value)
    return float(value) if isinstance(value, Tensor) else value


__all__ = [
    "DELAYED_GRADIENTS",
    "LATER_ENTRIES",
    "DelayedGradients",
    "OptimizerConfig",
    "StateTensor",
    "check_config",
    "hyper_values",
    "plain_value",
]
