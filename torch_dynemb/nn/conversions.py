"""Conversions of a model that its tables refuse, before another layer is converted.

``to()``, ``half()``, ``share_memory()`` and their kin convert one layer after the other, so an
error of a table would leave the layers before it converted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from torch_dynemb.nn.backward_updates import is_registered
from torch_dynemb.nn.torch_changes import replace

_local = threading.local()


def check_conversions() -> None:
    """Have models in this process ask their tables before they are converted."""
    replace("Module", nn.Module, "_apply", _checked)


def _checked(original: Any) -> Any:
    @functools.wraps(original)
    def apply(
        self: nn.Module, fn: Callable[[Tensor], Tensor], *arguments: Any, **keywords: Any
    ) -> Any:
        if getattr(_local, "is_checked", False):  # of a model that has been asked
            return original(self, fn, *arguments, **keywords)
        for tables in _converted_in(self):
            tables._check_conversion(fn)
        _local.is_checked = True
        try:
            return original(self, fn, *arguments, **keywords)
        finally:
            _local.is_checked = False

    return apply


def _converted_in(model: nn.Module) -> Iterator[Any]:
    """Yield the modules with tables that torch's own function converts.

    A module with another one may keep its children as they are.
    """
    for child in model.children():
        if is_registered(child):
            yield child
        elif type(child)._apply is nn.Module._apply:
            yield from _converted_in(child)


__all__ = ["check_conversions"]
