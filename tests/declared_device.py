"""Where a test file says that it runs: a marker in its ``pytestmark``, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

KINDS = ("any_device", "own_device", "cpu_only")
HOW_TO_SAY = (
    "says not where it runs: add `pytestmark = pytest.mark.any_device`, .own_device or "
    '.cpu_only("why") after its imports (tests/README.md)'
)


@cache
def declared_kind(file: Path) -> str | None:
    """The one of KINDS that a test file names; None where it names none, several, or no reason."""
    kinds = [kind for kind, has_reason in _declarations(file) if has_reason or kind != "cpu_only"]
    return kinds[0] if len(kinds) == 1 else None


def _declarations(file: Path) -> Iterator[tuple[str, bool]]:
    """The markers of KINDS in a file's ``pytestmark``, and whether they have an argument."""
    for statement in ast.parse(file.read_bytes()).body:
        if not isinstance(statement, ast.Assign) or ast.unparse(statement.targets) != "pytestmark":
            continue
        marks = statement.value
        for mark in marks.elts if isinstance(marks, (ast.List, ast.Tuple)) else [marks]:
            function = mark.func if isinstance(mark, ast.Call) else mark
            kind = ast.unparse(function).removeprefix("pytest.mark.")
            if kind in KINDS:
                yield kind, isinstance(mark, ast.Call) and bool(mark.args)
