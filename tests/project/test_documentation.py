"""Every public name says what it takes, of which shape, and what it raises."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Annotated, Any, NamedTuple

import pytest
from typing_extensions import TypedDict, Unpack, is_typeddict

from torch_dynemb import ops
from torch_dynemb.keyword_options import declared_options, takes_options

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from public_names import listed_names, returned_records

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("reads docstrings")

PACKAGES = (
    "torch_dynemb",
    "torch_dynemb.errors",
    "torch_dynemb.initializers",
    "torch_dynemb.nn",
    "torch_dynemb.optim",
    "torch_dynemb.policy",
    "torch_dynemb.ops",
    "torch_dynemb.checkpoint",
    "torch_dynemb.delta_log",
    "torch_dynemb.storage.tiers",
    "torch_dynemb.table",
    "torch_dynemb.serving",
    "torch_dynemb.retrieval",
    "torch_dynemb.oneembedding",
    "torch_dynemb.recis",
    "torch_dynemb.recis.functional",
    "torch_dynemb.torchrec",
    "torch_dynemb.migrate",
    "torch_dynemb.compat.dynamicemb",
    "torch_dynemb.compat.dynamicemb.planner",
    "torch_dynemb.compat.dynamicemb.optimizer",
    "torch_dynemb.compat.dynamicemb.incremental_dump",
    "torch_dynemb.compat.dynamicemb.dump_load",
    "torch_dynemb.compat.dynamicemb.dynamicemb_config",
    "torch_dynemb.compat.dynamicemb.types",
    "torch_dynemb.compat.dynamicemb.embedding_admission",
)
# Modules with docstrings of the same kind, although the reference leaves them out.
UNLISTED = (
    "torch_dynemb.doctor.facts",
    "torch_dynemb.doctor.findings",
    "torch_dynemb.plan.counting",
    "torch_dynemb.plan.growth",
)
# Names in the reference; each one is a promise. The number goes up with a capability alone.
MOST_NAMES = 369
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example|Examples|Yields):$", re.MULTILINE)
ENTRY = re.compile(r"^ {4}((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*): ?(.*)$")
# A shape: (B, dim), [n], int64 [N, dim]; or where it is said: "as in ...", "see ...", "those of"
SHAPE = re.compile(r"\[[^\]]*\]|\([^)]*,[^)]*\)|\b(as|see|those|that|shape|scalar|any|one)\b", re.I)
# Records of tensors, such as IndexTensors, say shapes themselves.
TENSOR = re.compile(r"\bTensor\b")


class Documented(NamedTuple):
    """Sections of a docstring: the text of each entry by name, and which sections there are."""

    entries: dict[str, str]
    sections: set[str]


def documented(text: str) -> Documented:
    parts = SECTION.split(inspect.cleandoc(text))
    entries: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title not in ("Args", "Attributes"):
            continue
        names: list[str] = []
        for line in body.splitlines():
            if found := ENTRY.match(line):
                names = [name.lstrip("*") for name in found[1].split(", ")]
                entries.update(dict.fromkeys(names, found[2]))
            else:
                for name in names:
                    entries[name] += " " + line.strip()
    return Documented(entries, set(parts[1::2]))


def own(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("torch_dynemb")


def raising(function: Callable[..., Any]) -> bool:
    """Whether a function raises in its own body, or in that of one of ours that it calls."""
    return _raises(function) or any(_raises(callee) for callee in _callees(function))


def _tree(function: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _raises(function: Callable[..., Any]) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(_tree(function)))


def _callees(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    names = {
        node.func.id
        for node in ast.walk(_tree(function))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for name in sorted(names):
        callee = inspect.unwrap(function).__globals__.get(name)
        if isinstance(callee, FunctionType) and own(callee):
            yield callee


def constructor(cls: type) -> Callable[..., Any] | None:
    """What runs when an instance is made, if it is ours."""
    for name in ("__post_init__", "__init__"):
        function = getattr(cls, name, None)
        if isinstance(function, FunctionType) and own(function) and _written(function):
            return function
    return None


def _written(function: FunctionType) -> bool:
    """Not made by dataclasses."""
    return function.__code__.co_filename != "<string>"


def parameters(thing: Any) -> dict[str, inspect.Parameter]:
    return {
        name: parameter
        for name, parameter in inspect.signature(thing).parameters.items()
        if name not in ("self", "cls") and not name.startswith("_")
    }


def problems(name: str, thing: Any, inherited: dict[str, str]) -> Iterator[str]:
    """What is missing from a docstring.

    Args:
        inherited: what base classes say of arguments.
    """
    text = thing.__doc__
    if not text:
        yield f"{name}: no docstring"
        return
    said = documented(text)
    entries = {**inherited, **said.entries}
    if is_typeddict(thing):
        for option, described in declared_options(thing).items():
            if not described.text:
                yield f"{name}: {option} is not documented"
        return
    called = thing
    if isinstance(thing, type):
        called = constructor(thing)
        if called is None and not (dataclasses.is_dataclass(thing) or hasattr(thing, "_fields")):
            return
        if called is not None:  # by its options; see takes_options()
            entries |= documented(called.__doc__ or "").entries
    for argument, parameter in parameters(thing).items():
        if argument not in entries:
            yield f"{name}: {argument} is not documented"
        elif TENSOR.search(str(parameter.annotation)) and not SHAPE.search(entries[argument]):
            yield f"{name}: {argument} has no shape: {entries[argument]!r}"
    if called is not None and raising(called) and "Raises" not in said.sections:
        inherits = isinstance(thing, type) and "Raises" in {
            section
            for base in thing.__mro__[1:-1]
            for section in documented(base.__doc__ or "").sections
        }
        if not inherits:
            yield f"{name}: no Raises"


def inherited_entries(cls: type) -> dict[str, str]:
    entries: dict[str, str] = {}
    for base in reversed(cls.__mro__[1:-1]):
        if own(base):
            entries.update(documented(base.__doc__ or "").entries)
    return entries


def methods(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """Public methods of a class and of our bases.

    Those that a base of torch asks for are left out, and so are those that a subclass defines.
    """
    for place, base in enumerate(cls.__mro__):
        for name, member in vars(base).items() if own(base) else ():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            of_base = any(name in vars(other) for other in cls.__mro__[place + 1 :])
            if name.startswith("_") or not isinstance(function, FunctionType) or of_base:
                continue
            is_abstract = "NotImplementedError" in function.__code__.co_names
            if not (is_abstract and any(name in vars(of) for of in cls.__mro__[:place])):
                yield name, function


def described(module: ModuleType) -> dict[str, Any]:
    """Classes and functions of a module by name, and the records that its functions return.

    Of ``torch_dynemb.ops`` also those that the package alone uses.
    """
    names = set(vars(module)) if module is ops else set(module.__all__)
    things = {name: getattr(module, name) for name in sorted(names)}
    for thing in list(things.values()):
        members = [f for _, f in methods(thing)] if isinstance(thing, type) else []
        for record in [of for f in (thing, *members) for of in returned_records(f)]:
            things.setdefault(record.__name__, record)
    return {
        name: thing
        for name, thing in things.items()
        if own(thing) and (isinstance(thing, type) or inspect.isfunction(thing))
    }


@pytest.mark.parametrize("package", [*PACKAGES, *UNLISTED])
def test_public_names_are_documented(package: str) -> None:
    found = []
    for name, thing in described(importlib.import_module(package)).items():
        found += problems(name, thing, inherited_entries(thing) if isinstance(thing, type) else {})
        if isinstance(thing, type):
            for method, function in methods(thing):
                found += problems(f"{name}.{method}", function, {})
    assert found == []


def test_packages_of_the_reference_are_completed() -> None:
    packages = {name.split(".")[1] for name in PACKAGES if name.count(".") == 1}
    packages -= {"errors", "initializers", "storage", "table"}  # by single names of torch_dynemb
    assert packages <= set(dir(td))
    for name in dir(td):
        assert getattr(td, name) is not None
    with pytest.raises(AttributeError, match="module 'torch_dynemb' has no attribute 'nothing'"):
        _ = td.nothing


def test_the_reference_does_not_grow() -> None:
    _, names, _ = listed_names()
    assert sum(len(of) for groups in names.values() for of in groups.values()) == MOST_NAMES


class HalfDocumented(TypedDict, total=False):
    """Options for the test below.

    Attributes:
        capacity: ids, at least 1.
    """

    capacity: Annotated[int, 1]
    colour: Annotated[str, "red"]


@takes_options
def half_documented(**options: Unpack[HalfDocumented]) -> None:
    """Do nothing.

    Args:
        **options: those of :class:`HalfDocumented`.
    """


class MadeByOptions:
    """Made by options."""

    @takes_options
    def __init__(self, size: int, **options: Unpack[HalfDocumented]) -> None: ...


def test_an_option_without_a_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(problems("f", half_documented, {})) == ["f: colour is not documented"]
    assert list(problems("T", HalfDocumented, {})) == ["T: colour is not documented"]
    monkeypatch.setattr(MadeByOptions.__init__, "__module__", "torch_dynemb.example")
    assert list(problems("M", MadeByOptions, {})) == [
        "M: size is not documented",
        "M: colour is not documented",
    ]
