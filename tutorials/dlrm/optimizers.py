"""What updates the rows and how they are kept: the job's options as configs of its tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

import torch_dynemb as td

RowDtype = Literal["float32", "bfloat16", "float16"]
StateDtype = Literal["float32", "bfloat16", "uint8"]
Rounding = Literal["stochastic", "nearest"]

DEFAULT = "rowwise-adagrad"

OPTIMIZERS: dict[str, Callable[[float], td.optim.OptimizerConfig]] = {
    "sgd": lambda lr: td.SGD(lr),
    "momentum-sgd": lambda lr: td.MomentumSGD(lr),
    "lars-sgd": lambda lr: td.LARSSGD(lr),
    "adagrad": lambda lr: td.Adagrad(lr),
    DEFAULT: lambda lr: td.RowWiseAdagrad(lr, eps=1e-8),
    "ftrl": lambda lr: td.Ftrl(lr),
    "group-ftrl": lambda lr: td.GroupFtrl(lr, group_l1=1e-6),
    "adam": lambda lr: td.Adam(lr),
    "adamw": lambda lr: td.AdamW(lr),
    "adamw-tf": lambda lr: td.AdamWTF(lr),
    "amsgrad": lambda lr: td.AMSGrad(lr),
    "smart-decay-adam": lambda lr: td.SmartDecayAdam(lr),
    "partial-rowwise-adam": lambda lr: td.PartialRowWiseAdam(lr),
    "lamb": lambda lr: td.LAMB(lr),
    "partial-rowwise-lamb": lambda lr: td.PartialRowWiseLAMB(lr),
}
"""Learning rate -> config, by the name that ``--optimizer`` takes."""


class RowOptions(NamedTuple):
    """How rows are updated and kept; what the command line says without a word about it."""

    optimizer: str = DEFAULT
    row_dtype: RowDtype = "float32"
    state_dtype: StateDtype = "float32"
    rounding: Rounding = "stochastic"
    split: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return _dtype(self.row_dtype)

    def config(self, lr: float) -> td.optim.OptimizerConfig:
        """Make the optimizer's config.

        Args:
            lr: Learning rate.

        Raises:
            ValueError: The optimizer has no state of that dtype.

        Example:
            >>> RowOptions("adam", state_dtype="uint8").config(0.01).state_dtype
            torch.uint8
        """
        config = OPTIMIZERS[self.optimizer](lr)
        changes: dict[str, Any] = {"stochastic_rounding": self.rounding == "stochastic"}
        if self.state_dtype != "float32":
            if self.state_dtype not in state_dtypes(self.optimizer):
                able = [name for name in OPTIMIZERS if self.state_dtype in state_dtypes(name)]
                raise ValueError(
                    f"--state-dtype {self.state_dtype}: {self.optimizer} has no state of this "
                    f"kind; use --state-dtype float32, or one of {', '.join(able)}"
                )
            changes["state_dtype"] = _dtype(self.state_dtype)
        return replace(config, **changes)


def state_dtypes(optimizer: str) -> tuple[StateDtype, ...]:
    """Return what the state of an optimizer may be kept in.

    Args:
        optimizer: A key of :data:`OPTIMIZERS`.

    Example:
        >>> state_dtypes("sgd"), state_dtypes("adagrad")
        (('float32',), ('float32', 'bfloat16'))
    """
    config = OPTIMIZERS[optimizer](1.0)
    if not hasattr(config, "state_dtype"):
        return ("float32",)
    if not isinstance(config, td.Adam):
        return ("float32", "bfloat16")
    return ("float32", "bfloat16", "uint8")


def check_baseline(options: RowOptions) -> None:
    """Refuse what hashed tables do not have, so that nobody compares unlike things.

    Raises:
        ValueError: The options are not those of the baseline.
    """
    for name, value in options._asdict().items():
        default = RowOptions._field_defaults[name]
        if value != default:
            option = "--accumulate" if name == "split" else f"--{name.replace('_', '-')} {value}"
            raise ValueError(
                f"{option}: the hashed tables of the baseline have float32 rows and row-wise "
                "Adagrad in every batch; add --no-baseline"
            )


def _dtype(name: RowDtype | StateDtype) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
