"""Options that several functions take by name: declared, documented and given a default once.

An option is a key of a TypedDict, which may inherit from others. Its annotation has its type and
its default, as ``Annotated[bool, False]``, and its text is an entry of the docstring of the class.
Type checkers read names and types from ``**options: Unpack[...]`` of a function;
:func:`takes_options` shows them at run time.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from typing_extensions import get_original_bases

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n?)+)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): ((?:.*\n?)(?: {8}.*\n?)*)", re.MULTILINE)
_ALONE = "Take these options, all by name.\n\nArgs:\n"
Function = TypeVar("Function", bound=Callable[..., Any])
Options = TypeVar("Options", bound=Mapping[str, object])


class FieldOf(NamedTuple):
    """Stands for a default: that of the dataclass's field of the same name, with its text.

    Attributes:
        config: the dataclass.
    """

    config: type[Any]


class KeywordOption(NamedTuple):
    """An option of a TypedDict.

    Attributes:
        kind: its type.
        default: what a call without it gets.
        text: of its documentation, with lines as in the docstring; "" where it has none.
    """

    kind: Any
    default: object
    text: str


def declared_options(declared: type) -> dict[str, KeywordOption]:
    """List the options of a TypedDict and of its bases.

    Args:
        declared: the TypedDict; each of its keys has a default.
    """
    texts = _texts_of(declared)
    found = {}
    for name, hint in get_type_hints(declared, include_extras=True).items():
        assert get_origin(hint) is Annotated, f"{declared.__name__}: {name} has no default"
        kind, default = get_args(hint)
        text = texts.get(name, "")
        if isinstance(default, FieldOf):
            text = documented_entries(default.config.__doc__).get(name, text)
            default = _default_of(default.config, name)
        found[name] = KeywordOption(kind, default, text)
    return found


def _texts_of(declared: Any) -> dict[str, str]:
    texts: dict[str, str] = {}
    for base in get_original_bases(declared):
        if hasattr(base, "__total__"):  # a TypedDict, which is not among the bases of a class
            texts |= _texts_of(base)
    return texts | documented_entries(declared.__doc__)


def _default_of(config: type[Any], name: str) -> object:
    (of,) = (of for of in dataclasses.fields(config) if of.name == name)
    return of.default if of.default_factory is dataclasses.MISSING else of.default_factory()


def documented_entries(docstring: str | None) -> dict[str, str]:
    """Read the entries of the section Args or Attributes of a docstring.

    Args:
        docstring: of a class or function; None: it has none.

    Returns:
        The text of each name. Lines after the first are indented by 8 spaces.
    """
    section = _SECTION.search(inspect.cleandoc(docstring or ""))
    return {
        name: text.rstrip()
        for names, text in _ENTRY.findall(section[1] if section else "")
        for name in names.split(", ")
    }


def takes_options(function: Function) -> Function:
    """Extend a function that ends in ``**options: Unpack[T]`` of a TypedDict ``T``.

    The function gets each option, with its default where a call leaves it out. ``help()`` and
    ``inspect.signature`` show the options by name, and its docstring documents them. An entry of
    the function's own docstring takes precedence.

    Args:
        function: a function or method, beneath ``classmethod``.

    Returns:
        The function. It raises TypeError for an unknown name, in Python's words, with a suggestion.
    """
    own = inspect.signature(function)
    *before, taken = own.parameters.values()
    options = declared_options(_declared_by(function, taken))
    shown = [
        inspect.Parameter(name, taken.KEYWORD_ONLY, default=option.default, annotation=option.kind)
        for name, option in options.items()
    ]
    signature = own.replace(parameters=[*before, *shown])
    defaults = {name: option.default for name, option in options.items()}

    @functools.wraps(function)
    def taking(*positional: Any, **named: Any) -> Any:
        for name in named:
            if name in signature.parameters:
                continue
            near = difflib.get_close_matches(name, signature.parameters, 1)
            suggestion = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{function.__qualname__}() got an unexpected keyword argument {name!r}{suggestion}"
            )
        return function(*positional, **{**defaults, **named})

    taking.__signature__ = signature  # type: ignore[attr-defined]
    taking.__doc__ = _documented(function.__doc__, options)
    return cast(Function, taking)


def _declared_by(function: Any, taken: inspect.Parameter) -> type:
    """Return the TypedDict of ``**options``; other annotations may name what comes later."""
    only = types.SimpleNamespace(__annotations__={taken.name: taken.annotation})
    (declared,) = get_args(get_type_hints(only, function.__globals__)[taken.name])
    return cast(type, declared)


def _documented(docstring: str | None, options: Mapping[str, KeywordOption]) -> str:
    """Add the texts of options to the section Args of a docstring."""
    own = inspect.cleandoc(docstring or _ALONE)
    known = documented_entries(own)
    added = "".join(
        f"    {name}: {option.text}\n"
        for name, option in options.items()
        if option.text and name not in known
    )
    section = _SECTION.search(f"{own}\n")
    at = len(own) + 1 if section is None else section.end()
    return f"{own}\n"[:at] + added + f"{own}\n"[at:]


def options_for(declared: type[Options], options: Mapping[str, object]) -> Options:
    """Return the options that a TypedDict has.

    Args:
        declared: the TypedDict.
        options: a TypedDict that inherits from it.
    """
    names = declared.__annotations__
    return cast(Options, {name: value for name, value in options.items() if name in names})


__all__ = [
    "FieldOf",
    "KeywordOption",
    "declared_options",
    "documented_entries",
    "options_for",
    "takes_options",
]
