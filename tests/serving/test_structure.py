"""Inputs of packages: their structure and their checks are those of pytree and the first run."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from torch_dynemb.serving.packages.inputs import Input, InputChecks, Size
from torch_dynemb.serving.packages.structure import Structure

pytestmark = pytest.mark.cpu_only("no op is called")

ONE, TWO, THREE = torch.ones(2), torch.zeros(3, 2), torch.arange(4)
X = Input("x", torch.float32, [None, Size(None, 0, 2, 2, 2)], None)
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "tensors": (ONE, TWO),
    "nested": ({"b": [ONE, (TWO,)], "a": {"c": THREE}}, 3, None),
    "another mapping": (OrderedDict(a=ONE, b=TWO), [THREE]),
    "empty": ({}, [], ONE),
}


def structure_of(inputs: tuple[Any, ...]) -> Structure:
    return Structure(pytree.tree_structure((inputs, {})))


@pytest.mark.parametrize("name", EXAMPLES)
def test_leaves_have_the_order_of_pytree(name: str) -> None:
    inputs = EXAMPLES[name]
    read, expected = structure_of(inputs).leaves(inputs), pytree.tree_leaves(inputs)
    assert list(map(id, read)) == list(map(id, expected))


def test_keys_of_a_dict_have_any_order() -> None:
    structure = structure_of(({"a": ONE, "b": TWO},))
    (read_one, read_two) = structure.leaves(({"b": TWO, "a": ONE},))
    assert read_one is ONE
    assert read_two is TWO


@pytest.mark.parametrize(
    "other",
    [
        ({"a": ONE}, [TWO]),
        ({"a": ONE, "c": TWO}, [TWO]),
        ({"a": ONE, "b": TWO, "c": TWO}, [TWO]),
        ({"a": ONE, "b": TWO}, (TWO,)),
        ({"a": ONE, "b": TWO}, []),
        ({"a": ONE, "b": TWO},),
        ([ONE, TWO], [TWO]),
    ],
)
def test_other_structures_are_refused(other: tuple[Any, ...]) -> None:
    structure = structure_of(({"a": ONE, "b": TWO}, [THREE]))
    with pytest.raises(TypeError, match="put together as"):
        structure.leaves(other)


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (torch.zeros(3, 2, dtype=torch.float64), TypeError),
        (torch.zeros(3, 3), ValueError),
        (torch.zeros(6), ValueError),
        (torch.zeros(3, 2, device="meta"), ValueError),
        (torch.zeros(3, 2).to_sparse(), TypeError),
        ([[0.0, 0.0]], TypeError),
    ],
)
def test_inputs_like_the_last_ones_are_checked(other: Any, error: type[Exception]) -> None:
    checks = InputChecks([X], torch.device("cpu"))
    checks.tensors([TWO])
    with pytest.raises(error, match="'x'"):
        checks.tensors([other])
    assert checks.tensors([TWO])[0] is TWO


def test_inputs_like_the_last_ones_become_contiguous() -> None:
    checks = InputChecks([X], torch.device("cpu"))
    checks.tensors([TWO])
    strided = torch.arange(6.0).view(2, 3).t()
    (taken,) = checks.tensors([strided])
    assert taken.is_contiguous()
    assert torch.equal(taken, strided)
