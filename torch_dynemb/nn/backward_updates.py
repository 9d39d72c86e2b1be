"""The modules of this process with rows that backward updates.

Calls of torch that change gradients between backward and step come too late for such rows.
``loss_scaling.py`` and ``gradient_clipping.py`` find out here whether a call concerns some.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

_modules: weakref.WeakSet[Any] = weakref.WeakSet()


def register_tables(module: Any) -> None:
    """Add a module with tables; it may get an optimizer, or another mode, later."""
    _modules.add(module)


def is_registered(module: Any) -> bool:
    """Return whether a module has been added."""
    return module in _modules


def registered_in(model: Any) -> list[Any]:
    """Return the registered modules of a model, at any depth."""
    return [module for module in model.modules() if module in _modules] if _modules else []


def updated_in_backward() -> list[Any]:
    """Return the registered modules with rows that a backward would update now."""
    return [m for m in list(_modules) if m.trainable and not m.group.config.split]


def split_modules() -> list[Any]:
    """Return the registered modules in split mode: backward gathers gradients."""
    return [m for m in list(_modules) if m.trainable and m.group.config.split]


def names_of(modules: Iterable[Any]) -> str:
    """Return modules with the names of their first tables, for an error."""
    found = []
    for module in modules:
        names = module.group.names
        more = ", ..." if len(names) > 3 else ""
        found.append(f"{type(module).__name__} ({', '.join(names[:3])}{more})")
    return " and ".join(sorted(found))


__all__ = [
    "is_registered",
    "names_of",
    "register_tables",
    "registered_in",
    "split_modules",
    "updated_in_backward",
]
