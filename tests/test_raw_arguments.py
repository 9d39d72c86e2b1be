"""One wrong argument of an op: the error, of a kernel or a fake, names the op and the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from op_cases import CASES, OPTIMIZERS, op_names
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# All optimizers check their arguments by one function.
NAMES = [
    name
    for name in op_names()
    if not name.startswith(tuple(f"{other}_" for other in OPTIMIZERS if other != "adam"))
]

TENSOR_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda t: t.half() if t.dtype == torch.float64 else t.double(),
    "dimensions": lambda t: t[None, None],
    "scalar": lambda t: t.new_zeros(()),
    "empty": lambda t: t.new_zeros((0,)),
    "sparse": lambda t: t.to_sparse() if t.dim() > 0 else t,
    "meta": lambda t: t.to("meta"),
}
NUMBER_CHANGES: dict[str, Callable[[int], int]] = {
    "negative": lambda _: -5,
    "huge": lambda _: 2**62,
}


def schema(name: str) -> torch.FunctionSchema:
    return getattr(torch.ops.dynemb, name).default._schema


def arguments_of(name: str) -> list[Any]:
    """Of a case with weights where the op takes them."""
    cases = CASES[name]
    chosen = next((label for label in cases if label.startswith(("weighted", "scored"))), None)
    return list(next(iter(cases.values()))() if chosen is None else cases[chosen]())


def first_of(given: Any) -> Any:
    return given[0] if isinstance(given, list) and given else given


def with_first(given: Any, value: Any) -> Any:
    return [value, *given[1:]] if isinstance(given, list) and given else value


def wrong_arguments(name: str) -> Iterator[tuple[str, str, Callable[[], list[Any]]]]:
    """The argument, what is wrong with it, and what makes the arguments of the call."""

    def changed(position: int, change: Callable[[Any], Any]) -> Callable[[], list[Any]]:
        def make() -> list[Any]:
            arguments = arguments_of(name)
            given = arguments[position]
            arguments[position] = with_first(given, change(first_of(given)))
            return arguments

        return make

    for position, given in enumerate(arguments_of(name)):
        argument = schema(name).arguments[position].name
        first = first_of(given)
        if isinstance(first, Tensor):
            changes: dict[str, Any] = {**TENSOR_CHANGES, "None": lambda _: None}
        elif type(first) is int:
            changes = {**NUMBER_CHANGES, "None": lambda _: None}
        else:
            continue
        for what, change in changes.items():
            yield argument, what, changed(position, change)
        if isinstance(given, list):
            yield argument, "no entries", changed_list(name, position, lambda entries: [])
            more = lambda entries: [*entries, entries[0]]  # noqa: E731
            yield argument, "an entry more", changed_list(name, position, more)


def changed_list(
    name: str, position: int, change: Callable[[list[Any]], list[Any]]
) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        arguments = arguments_of(name)
        arguments[position] = change(arguments[position])
        return arguments

    return make


def said(name: str, arguments: list[Any]) -> str | None:
    """What the call raises; None: nothing."""
    try:
        getattr(torch.ops.dynemb, name)(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def fake(given: Any, mode: FakeTensorMode) -> Any:
    if isinstance(given, list):
        return [fake(entry, mode) for entry in given]
    if isinstance(given, Tensor):
        return mode.from_tensor(given)
    return given


def names_it(message: str, name: str, argument: str) -> bool:
    """Whether an error names the op and the argument, or one that it does not fit."""
    others = [other.name for other in schema(name).arguments]
    if message.startswith("NotImplementedError: There were no tensor arguments"):
        return len([a for a in schema(name).arguments if "Tensor" in str(a.type)]) == 1
    said_of = message.partition(f"dynemb::{name}")[2]
    return argument in said_of or any(f" {other}" in said_of for other in others)


@pytest.mark.parametrize("name", NAMES)
def test_the_error_names_op_and_argument(name: str) -> None:
    unnamed = []
    for argument, what, make in wrong_arguments(name):
        message = said(name, make())
        if message is not None and not names_it(message, name, argument):
            unnamed.append((argument, what, message.partition("\n")[0]))
    assert unnamed == []


@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_a_traced_call_names_op_and_argument(name: str) -> None:
    unnamed = []
    for argument, what, make in wrong_arguments(name):
        arguments = make()
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            arguments = [fake(given, mode) for given in arguments]
            message = said(name, arguments)
        if message is not None and not names_it(message, name, argument):
            unnamed.append((argument, what, message.partition("\n")[0]))
    assert unnamed == []
