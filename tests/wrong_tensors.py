"""Every tensor argument of every op, given wrongly: what the op says, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from op_cases import CASES, schema
from torch import Tensor

# Given to the lookups for their backward only.
UNREAD_IN_FORWARD = {
    *("state", "dirty_bits", "copy_on_write"),
    *("hyper", "pending", "grad_anchor"),
}


# Tensors, and lists of some, of any shape.
ANY_SHAPE = {
    "crc32c": ("data",),
    "mod": ("values",),
    "bucketize": ("values",),
    "multi_hash": ("values",),
    "ids_concat": ("ids",),
    "ids_encode": ("ids",),
    "dense_to_ragged": ("dense",),
}
# Values of any dtype, and lists of some.
ANY_DTYPE = ("values", "dense", "tensor", "data")


def all_tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    lists = [a if isinstance(a, list) else [a] for a in arguments]
    return [item for items in lists for item in items if isinstance(item, Tensor)]


# Where an op is called: a case is made outside of it, which the emulator takes long for.
Within = Callable[[], AbstractContextManager[object]]


def check_raises(
    name: str, arguments: tuple[Any, ...], message: str, within: Within = nullcontext
) -> None:
    """Also that the tensors of the call are what they were."""
    tensors = all_tensors(arguments)
    before = [tensor.detach().clone() for tensor in tensors]
    with within(), pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.dynemb, name)(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def tensor_arguments() -> Iterator[Any]:
    """Every tensor argument of every op that the op itself reads."""
    for name in sorted(CASES):
        for position, argument in enumerate(schema(name).arguments):
            unread = name == "embedding" and argument.name in UNREAD_IN_FORWARD
            # of the case: rows are copied on write during a save only
            is_list = str(argument.type) == "List[Tensor]"
            no_copies = argument.name == "copy_on_write" and is_list
            if "Tensor" in str(argument.type) and not unread and not no_copies:
                yield pytest.param(name, position, id=f"{name} {argument.name}")


def case_of(name: str) -> tuple[Any, ...]:
    """A case with per_sample_weights and scores where the op takes them."""
    cases = CASES[name]
    chosen = next((label for label in cases if label.startswith(("weighted", "scored"))), None)
    return next(iter(cases.values()))() if chosen is None else cases[chosen]()


def altered(name: str, position: int, change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """The op's arguments with one tensor changed; of a list, the first."""
    arguments = list(case_of(name))
    given = arguments[position]
    if isinstance(given, list):
        arguments[position] = [change(given[0]), *given[1:]]
    else:
        arguments[position] = change(given)
    return tuple(arguments)


EVERY_TENSOR = pytest.mark.parametrize(("name", "position"), list(tensor_arguments()))


def check_dtype(name: str, position: int, within: Within = nullcontext) -> None:
    argument = schema(name).arguments[position].name
    if argument in ANY_DTYPE and name.startswith(("ragged_", "dense_to_", "release_", "crc32c")):
        return
    arguments = altered(
        name, position, lambda t: t.half() if t.dtype == torch.float64 else t.double()
    )
    expected = rf"{name}: {argument}(\[0\])? has dtype float(16|64), expected (\w+\d|bool)"
    check_raises(name, arguments, expected, within)


def check_strides(name: str, position: int, within: Within = nullcontext) -> None:
    argument = schema(name).arguments[position].name
    arguments = altered(name, position, strided)
    first = arguments[position][0] if isinstance(arguments[position], list) else arguments[position]
    if first.is_contiguous():  # of one element
        return
    message = rf"{name}: {argument}(\[0\])? is not contiguous: call \.contiguous\(\)"
    check_raises(name, arguments, message, within)


def check_dimensions(name: str, position: int, within: Within = nullcontext) -> None:
    """A scalar in place of every tensor."""
    if schema(name).arguments[position].name in ANY_SHAPE.get(name, ()):
        return
    arguments = altered(name, position, lambda t: t.new_zeros(()))
    check_raises(name, arguments, rf"{name}: ", within)
