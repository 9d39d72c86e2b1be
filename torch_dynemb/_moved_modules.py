"""Where modules of earlier versions are now: a pickle names the module of every class in it."""

from __future__ import annotations

import importlib
import sys

_MOVED = {
    "torch_dynemb": {
        "admission": "policy.admission",
        "evictions": "table.evictions",
        "freeze": "serving.freeze",
        "nn.features": "nn.inputs",
        "row_access": "table.rows",
        "sending": "process.sending",
        "table_config": "table.config",
        "table_stats": "table.stats",
    },
}


def resolve_moved_modules(package: str) -> None:
    """Gives the modules of a package the names of earlier versions beside their own.

    Args:
        package: such as ``"torch_dynemb"``; what a package inside of it has moved, it says itself.
    """
    for old, new in _MOVED[package].items():
        sys.modules[f"{package}.{old}"] = importlib.import_module(f"{package}.{new}")


__all__ = ["resolve_moved_modules"]
