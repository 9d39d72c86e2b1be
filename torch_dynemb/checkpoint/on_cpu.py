"""Files are read into, and written from, memory of the CPU, whatever torch's default device is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Has tensors that a function makes, without saying where, lie on the CPU."""

    @functools.wraps(function)
    def run(*arguments: P.args, **named: P.kwargs) -> R:
        with torch.device("cpu"):
            return function(*arguments, **named)

    return run


__all__ = ["on_cpu"]
