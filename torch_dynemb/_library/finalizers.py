"""Ops that run when an object is freed, which may be at any time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


def finalize(owner: object, function: Callable[..., object], *arguments: Any) -> weakref.finalize:  # type: ignore[type-arg]
    """Call a function when ``owner`` is freed.

    Python's garbage collector may free it while torch.compile traces other code. Modes of the
    trace, such as FakeTensorMode, would take the ops of the function, which must run.
    """
    return weakref.finalize(owner, _run, function, arguments)


def _run(function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    with torch._C._DisableTorchDispatch():
        function(*arguments)


__all__ = ["finalize"]
