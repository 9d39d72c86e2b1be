"""Fixtures of tests of programs in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def repository_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """For imports of benchmarks, also where pytest was not started by ``python -m``."""
    monkeypatch.syspath_prepend(str(ROOT))
