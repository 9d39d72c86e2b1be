"""Code of the library distinguishes errors by class or number, never by text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_dynemb

pytestmark = pytest.mark.cpu_only("reads sources")

PACKAGE = Path(torch_dynemb.__file__).parent
# The compiled library ends messages with a mark of their class, which is read there alone; names of
# tables are put into messages beside it.
# the words of the compiled library, and of Redis' protocol, are for programs
READERS = {
    "_library/typed_errors.py",
    "_library/error_names.py",
    "delta_log/redis/connection.py",
}
TESTS = ("startswith", "endswith", "find", "index", "count", "removeprefix", "removesuffix")
PATTERNS = ("match", "fullmatch", "search", "findall", "finditer", "split")


def errors_of(tree: ast.AST) -> set[str]:
    """Names that an ``except`` or an argument gives to errors."""
    names = {of.name for of in ast.walk(tree) if isinstance(of, ast.ExceptHandler) and of.name}
    for argument in ast.walk(tree):
        if isinstance(argument, ast.arg) and argument.annotation is not None:
            kinds = [of for of in ast.walk(argument.annotation) if isinstance(of, ast.Name)]
            if any(of.id.endswith(("Error", "Exception")) for of in kinds):
                names.add(argument.arg)
    return names


def is_text(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is ``str(error)``, ``repr(error)``, ``error.args`` or a part of it."""
    said = [
        part.args[0] if isinstance(part, ast.Call) else part.value
        for part in ast.walk(node)
        if (isinstance(part, ast.Call) and part.args and ast.unparse(part.func) in ("str", "repr"))
        or (isinstance(part, ast.Attribute) and part.attr in ("args", "strerror"))
    ]
    return any(isinstance(of, ast.Name) and of.id in names for of in said)


def text_tests(source: str) -> Iterator[int]:
    """Lines that compare the text of an error, or look for something in it."""
    tree = ast.parse(source)
    names = errors_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = [node.func.value] if node.func.attr in TESTS else []
            parts += node.args if node.func.attr in PATTERNS else []
        else:
            continue
        if any(is_text(part, names) for part in parts):
            yield node.lineno


@pytest.mark.long
def test_no_code_tests_the_text_of_an_error() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name not in READERS:
            found += [f"{name}:{line}" for line in text_tests(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ('if "verflow" in str(error): pass', [4]),
        ('if error.args[0] == "full": pass', [4]),
        ('if str(error).startswith("no"): pass', [4]),
        ('if re.search("no", str(error)): pass', [4]),
        ('if "x" in repr(error): pass', [4]),
        ("if error.errno == 28: pass", []),
        ("if isinstance(error, OSError): pass", []),
        ('raise ValueError(f"f: {error}") from error', []),
        ("told = str(error).splitlines()[0]", []),
    ],
)
def test_what_counts_as_a_test_of_a_text(line: str, lines: list[int]) -> None:
    source = f"try:\n    f()\nexcept RuntimeError as error:\n    {line}\n"
    assert list(text_tests(source)) == lines


def test_arguments_are_errors_too() -> None:
    source = 'def f(error: RuntimeError) -> bool:\n    return "full" in str(error)\n'
    assert list(text_tests(source)) == [2]
