"""Loads the compiled library, which registers ``torch.ops.dynemb``."""

from __future__ import annotations

from pathlib import Path

import torch

_FILE = "_C.abi3.so"


def load_library() -> None:
    """Loads ``torch_dynemb/_C.abi3.so`` into the process; does nothing if it is loaded.

    Raises:
        ImportError: the library has not been built.
    """
    path = Path(__file__).parent / _FILE
    if not path.exists():
        raise ImportError(
            f"torch_dynemb: {_FILE} is missing from {path.parent.name}/: build it with `make build` "
            "or `pip install --no-build-isolation -e .`"
        )
    torch.ops.load_library(str(path))
