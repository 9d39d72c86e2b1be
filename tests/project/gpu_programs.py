"""The programs of benchmarks/gpu, as tests take them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.gpu.{name}")


def shared(name: str) -> Any:
    """One that programs for CPUs use, too."""
    return importlib.import_module(f"benchmarks.common.{name}")
