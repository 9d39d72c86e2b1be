"""``make docs``: the API reference has every public name, and nothing in it leads nowhere."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.cpu_only("a program, in a process of its own")

PROGRAM = Path(__file__).resolve().parents[1] / "tools" / "api_reference.py"


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    pytest.importorskip("pdoc")
    return runpy.run_path(str(PROGRAM))


def test_the_reference_has_every_public_name(program: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    subprocess.run([sys.executable, str(PROGRAM), str(folder)], check=True, timeout=280)
    index = (folder / "index.html").read_text()
    for package in program["PACKAGES"]:
        assert f'href="{package}.html"' in index
        page = (folder / f"{package}.html").read_text()
        for name in importlib.import_module(package).__all__:
            if not isinstance(getattr(importlib.import_module(package), name), ModuleType):
                assert f'id="{name}"' in page, f"{package}.{name}"


def test_references_that_lead_nowhere_are_found(program: dict[str, Any]) -> None:
    module = ModuleType("torch_dynemb.example")

    def documented() -> None:
        """See :func:`torch_dynemb.freeze`, :class:`~torch_dynemb.Policy` and
        :meth:`torch_dynemb.TableGroup.statistics`.
        """

    module.documented = documented  # type: ignore[attr-defined]
    module.__all__ = ["documented"]  # type: ignore[attr-defined]
    assert list(program["missing_references"](module)) == [
        "torch_dynemb.example.documented refers to torch_dynemb.TableGroup.statistics, which does "
        "not exist"
    ]


def test_packages_are_those_whose_docstrings_are_tested(program: dict[str, Any]) -> None:
    from test_documentation import PACKAGES

    assert set(program["PACKAGES"]) == set(PACKAGES)
