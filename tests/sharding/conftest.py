"""Tests of the TorchRec integration are skipped where there is none."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

INSTALLED = importlib.util.find_spec("torchrec") is not None


class _NotInstalled(pytest.File):
    """A file of tests that need TorchRec."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("TorchRec is not installed: make test installs it")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    """Skips the whole directory where TorchRec is not installed."""
    return None if INSTALLED else _NotInstalled.from_parent(parent, path=module_path)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
