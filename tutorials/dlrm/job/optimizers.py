"""Optimizers of the rows, and what the rows and their state are kept in."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import torch_dynemb as td

DEFAULT = "rowwise-adagrad"

OPTIMIZERS: dict[str, Callable[[float], td.optim.OptimizerConfig]] = {
    "sgd": td.SGD,
    "momentum-sgd": td.MomentumSGD,
    "lars-sgd": td.LARSSGD,
    "adagrad": td.Adagrad,
    DEFAULT: lambda lr: td.RowWiseAdagrad(lr, eps=1e-8),
    "rmsprop": td.RMSprop,
    "rowwise-rmsprop": td.RowWiseRMSprop,
    "adadelta": td.Adadelta,
    "ftrl": td.Ftrl,
    "group-ftrl": lambda lr: td.GroupFtrl(lr, group_l1=1e-6),
    "adam": td.Adam,
    "adamw": td.AdamW,
    "adamw-tf": td.AdamWTF,
    "amsgrad": td.AMSGrad,
    "smart-decay-adam": td.SmartDecayAdam,
    "partial-rowwise-adam": td.PartialRowWiseAdam,
    "lamb": td.LAMB,
    "partial-rowwise-lamb": td.PartialRowWiseLAMB,
}
"""Learning rate -> config, by the name that ``--optimizer`` takes."""


def row_optimizer(opts: Namespace) -> td.optim.OptimizerConfig:
    """Make the config of the optimizer of the rows.

    Raises:
        ValueError: The optimizer has no state of that dtype, or the baseline has no such rows.
    """
    if opts.baseline:
        _check_baseline(opts)
    changes: dict[str, Any] = {"stochastic_rounding": opts.rounding == "stochastic"}
    if opts.state_dtype != "float32":
        if opts.state_dtype not in state_dtypes(opts.optimizer):
            able = [name for name in OPTIMIZERS if opts.state_dtype in state_dtypes(name)]
            raise ValueError(
                f"--state-dtype {opts.state_dtype}: {opts.optimizer} has no state of this kind; "
                f"use --state-dtype float32, or one of {', '.join(able)}"
            )
        changes["state_dtype"] = getattr(torch, opts.state_dtype)
    return replace(OPTIMIZERS[opts.optimizer](opts.lr), **changes)


def state_dtypes(optimizer: str) -> tuple[str, ...]:
    """Return what the state of an optimizer may be kept in.

    Example:
        >>> state_dtypes("sgd"), state_dtypes("adagrad")
        (('float32',), ('float32', 'bfloat16'))
    """
    config = OPTIMIZERS[optimizer](1.0)
    if not hasattr(config, "state_dtype"):
        return ("float32",)
    return ("float32", "bfloat16", "uint8")[: 3 if isinstance(config, td.Adam) else 2]


def _check_baseline(opts: Namespace) -> None:
    """Refuse rows that hashed tables do not have: unlike things would be compared."""
    defaults = {"optimizer": DEFAULT, "row_dtype": "float32", "state_dtype": "float32"}
    differing = [
        f"--{name.replace('_', '-')} {getattr(opts, name)}"
        for name, default in (defaults | {"rounding": "stochastic"}).items()
        if getattr(opts, name) != default
    ]
    if opts.accumulate > 1:
        differing.append("--accumulate")
    if differing:
        raise ValueError(
            f"{differing[0]}: the hashed tables of the baseline have float32 rows and row-wise "
            "Adagrad in every batch; add --no-baseline"
        )
