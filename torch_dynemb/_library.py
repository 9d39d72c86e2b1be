"""The compiled library, which registers ``torch.ops.dynemb``, and what Python adds to its ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

_FILE = "_C.abi3.so"

Function = TypeVar("Function", bound=Callable[..., Any])


def load_library() -> None:
    """Loads ``torch_dynemb/_C.abi3.so`` into the process; does nothing if it is loaded.

    Raises:
        ImportError: the library has not been built.
    """
    path = Path(__file__).parent / _FILE
    if not path.exists():
        raise ImportError(
            f"torch_dynemb: {_FILE} is missing from {path.parent.name}/: build it with `make "
            "build` or `pip install --no-build-isolation -e .`"
        )
    torch.ops.load_library(str(path))


def register_fake(op: str) -> Callable[[Function], Function]:
    """``torch.library.register_fake`` for ``dynemb::op``, with a type that keeps the function's."""
    register: Callable[[Function], Function] = torch.library.register_fake(f"dynemb::{op}")
    return register
