"""The packages that tests of this folder share, because compiling one takes half a minute."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from packaged import make_live_package, make_package
from torch import nn


class Package(NamedTuple):
    """A package, and the frozen model that it was made of."""

    path: Path
    frozen: nn.Module


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    path = tmp_path_factory.mktemp("served") / "package"
    return Package(path, make_package(path))


@pytest.fixture(scope="session")
def live_package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    path = tmp_path_factory.mktemp("served_live") / "package"
    return Package(path, make_live_package(path))


@pytest.fixture(scope="session")
def file_package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    path = tmp_path_factory.mktemp("served_file") / "package"
    return Package(path, make_live_package(path, headroom=110, in_file=True))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Directory in which processes share tables."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder
