"""Imports inside the package point one way: a room imports the rooms below it, and none above."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_dynemb

pytestmark = pytest.mark.cpu_only("reads sources")

PACKAGE = Path(torch_dynemb.__file__).parent
# From below to above; rooms of one line know nothing of each other.
FLOORS = (
    ("errors",),
    ("argument_checks", "keyword_options", "process", "_version"),
    ("_library",),
    ("ops",),
    ("console", "files"),
    ("initializers",),
    ("optim", "policy"),
    ("storage",),
    ("distributed",),
    ("table",),
    ("rows",),
    ("nn",),
    ("parts",),
    ("changes",),
    ("checkpoint",),
    ("delta_log",),
    ("serving",),
    ("retrieval",),
    ("oneembedding", "recis", "torchrec"),
    ("migrate",),
    ("compat", "doctor", "plan"),
    ("__main__",),
)
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    """Name within the package -> file."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(path: Path, known: set[str]) -> Iterator[str]:
    """Modules of the package that a file imports anywhere, also for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path.name}:{node.lineno}: a relative import hides where to")
        else:
            continue
        for name in names:
            if name.partition(".")[0] != "torch_dynemb":
                continue
            inside = name.partition(".")[2]
            while inside not in known:
                inside = inside.rpartition(".")[0]
            yield inside


MODULES = modules()
IMPORTED = {name: set(imported(path, set(MODULES))) for name, path in MODULES.items()}


def test_every_room_has_its_floor() -> None:
    rooms = {name.partition(".")[0] for name in MODULES} - {""}
    assert rooms == HEIGHT.keys()


def test_imports_do_not_point_up() -> None:
    wrong = []
    for name in sorted(set(MODULES) - {""}):
        room = name.partition(".")[0]
        for other in IMPORTED[name]:
            there = other.partition(".")[0]
            if there != room and (there == "" or HEIGHT[there] >= HEIGHT[room]):
                wrong.append(f"{name} imports {other or 'torch_dynemb'}")
    assert wrong == []


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, or none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        path.append(name)
        for other in sorted(graph[name]):
            if found := visit(other):
                return found
        path.pop()
        done.add(name)
        return []

    for name in sorted(graph):
        if found := visit(name):
            return found
    return []


def test_no_circle_of_imports() -> None:
    """Packages apart: importing a module runs the ``__init__`` of its package, which imports it."""
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    graph = {
        name: IMPORTED[name] - {name} - packages
        for name, path in MODULES.items()
        if name not in packages
    }
    assert circle(graph) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@pytest.mark.long
def test_what_takes_long_to_import_is_left_to_those_who_need_it() -> None:
    slow = (
        "torch.distributed.tensor",
        "torch._inductor",
        "torch._dynamo",
        "torchrec",
        "setuptools",
    )
    code = f"import sys, torch_dynemb; print([name for name in {slow} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
