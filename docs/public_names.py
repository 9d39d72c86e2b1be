"""The names of the reference: those of the modules that ``reference.md`` lists."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from typing_extensions import get_type_hints

MODULES = re.findall(
    r"^   (torch_dynemb[\w.]*)$",
    (Path(__file__).parent / "reference.md").read_text(),
    re.MULTILINE,
)
# Packages with more names list them by the modules that define them.
LONG_LIST = 30


def listed_names() -> tuple[dict[int, str], dict[str, dict[str, list[str]]], dict[str, list[str]]]:
    """List the public names.

    Returns:
        The full name of each class and function by its address: that in the first of its modules,
        where it has a page; for each module the names that have a page there, by headings; and the
        full names of those that have it elsewhere.
    """
    pages: dict[int, str] = {}
    data: dict[tuple[str, int], str] = {}
    here: dict[str, dict[str, list[str]]] = {}
    elsewhere: dict[str, list[str]] = {}
    for module in MODULES:
        defined = list(vars(importlib.import_module(module)))  # in the order of imports
        names = sorted(importlib.import_module(module).__all__, key=defined.index)
        here[module], elsewhere[module] = defaultdict(list), []
        for name in names:
            value = getattr(importlib.import_module(module), name)
            page = f"{module}.{name}"
            if page in MODULES:
                continue
            if inspect.isclass(value) or inspect.isroutine(value):
                page = pages.setdefault(id(value), page)
            else:  # a number may be that of another name
                page = data.setdefault((name, id(value)), page)
            if page.rpartition(".")[0] == module:
                here[module][heading(value, module, len(names))].append(name)
            else:
                elsewhere[module].append(page)
        here[module] = dict(sorted(here[module].items(), key=lambda group: group[0] == "Data"))
    return pages, here, elsewhere


def heading(value: object, module: str, names: int) -> str:
    """Name the kind of a value or, in a long list, what its module is about."""
    defined = getattr(value, "__module__", None)
    if defined is None or not defined.startswith("torch_dynemb"):
        return "Data"
    if names > LONG_LIST:
        if defined.startswith(f"{module}."):
            defined = f"{module}." + defined.removeprefix(f"{module}.").split(".")[0]
        return (importlib.import_module(defined).__doc__ or "").partition("\n")[0].rstrip(".")
    if inspect.isclass(value):
        return "Exceptions" if issubclass(value, BaseException) else "Classes"
    return "Functions"


def returned_records(value: Any) -> list[type]:
    """List the records of the package that a function or property returns, or a record has.

    A record without a page is described on the page of each function that returns it.
    """
    function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
    if not str(getattr(function, "__module__", None)).startswith("torch_dynemb"):
        return []
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # imported for type checkers only; has no hints
        return []
    found = [hints.get("return")]
    if isinstance(value, type):
        found = [*hints.values()] if _is_record(value) else []
    return list(dict.fromkeys(cls for of in found for cls in _classes(of) if _is_record(cls)))


def _classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for part in hint if isinstance(hint, list) else get_args(hint):
        yield from _classes(part)


def _is_record(cls: type) -> bool:
    """Return whether a class of the package has fields and no public methods."""
    return (
        cls.__module__.startswith("torch_dynemb")
        and (hasattr(cls, "_fields") or dataclasses.is_dataclass(cls))
        and not any(
            inspect.isfunction(of) for name, of in vars(cls).items() if not name.startswith("_")
        )
    )
