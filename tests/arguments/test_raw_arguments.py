"""One wrong argument of an op: the error, of a kernel or a fake, names the op and the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from op_cases import CASES, schema
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytestmark = pytest.mark.cpu_only("test_cuda_kernels compares a GPU with it")

NAMES = sorted(CASES)

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


def arguments_of(name: str) -> list[Any]:
    """Of a case with weights where the op takes them."""
    cases = CASES[name]
    chosen = next((label for label in cases if label.startswith(("weighted", "scored"))), None)
    return list(next(iter(cases.values()))() if chosen is None else cases[chosen]())


def first_of(given: Any) -> Any:
    return given[0] if isinstance(given, list) and given else given


def with_first(given: Any, value: Any) -> Any:
    return [value, *given[1:]] if isinstance(given, list) and given else value


def wrong_arguments(name: str) -> Iterator[tuple[int, str, Callable[[Any], Any]]]:
    """The position of an argument, what is wrong with it, and what makes it wrong."""

    def of_first(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda given: with_first(given, change(first_of(given)))

    for position, given in enumerate(arguments_of(name)):
        first = first_of(given)
        if isinstance(first, Tensor):
            changes: dict[str, Any] = {**TENSOR_CHANGES, "None": lambda _: None}
        elif type(first) is int:
            changes = {**NUMBER_CHANGES, "None": lambda _: None}
        else:
            continue
        for what, change in changes.items():
            yield position, what, of_first(change)
        if isinstance(given, list):
            yield position, "no entries", lambda _: []
            yield position, "an entry more", lambda entries: [*entries, entries[0]]


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
    if message.startswith("NotImplementedError") and "no tensor arguments" in message:
        return len([a for a in schema(name).arguments if "Tensor" in str(a.type)]) == 1
    said_of = message.partition(f"dynemb::{name}")[2]
    return argument in said_of or any(f" {other}" in said_of for other in others)


def unnamed(name: str, call: Callable[[int, Callable[[Any], Any]], str | None]) -> list[Any]:
    """The errors of wrong arguments that do not say what is wrong.

    Args:
        name: of the op.
        call: makes an argument wrong, and returns what the op says of it.
    """
    found = []
    for position, what, change in wrong_arguments(name):
        argument = schema(name).arguments[position].name
        message = call(position, change)
        if message is not None and not names_it(message, name, argument):
            found.append((argument, what, message.partition("\n")[0]))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_error_names_op_and_argument(name: str) -> None:
    def call(position: int, change: Callable[[Any], Any]) -> str | None:
        arguments = arguments_of(name)  # of its own: a call that works changes them
        arguments[position] = change(arguments[position])
        return said(name, arguments)

    assert unnamed(name, call) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_a_traced_call_names_op_and_argument(name: str) -> None:
    arguments = arguments_of(name)
    # One for all calls of the op: to make fakes takes far longer than the calls. It finds those of
    # the other tensors only while they are referenced.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    held = [fake(given, mode) for given in arguments]

    def call(position: int, change: Callable[[Any], Any]) -> str | None:
        wrong = [*arguments]
        wrong[position] = change(wrong[position])
        with mode:
            return said(name, [fake(given, mode) for given in wrong])

    assert unnamed(name, call) == []
    assert len(held) == len(arguments)
