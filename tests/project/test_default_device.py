"""What torch_dynemb makes does not depend on torch's default device, which programs may set."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import torch_dynemb

pytestmark = pytest.mark.cpu_only("reads sources")

PACKAGE = Path(torch_dynemb.__file__).parent
FACTORIES = {one.__name__ for one in _device_constructors() if hasattr(torch, one.__name__)}
CALL = re.compile(rf"\btorch\.({'|'.join(sorted(FACTORIES))})\(")


def calls_without_device(source: str) -> Iterator[int]:
    """Lines of calls of torch's factories that leave the device to torch."""
    if not CALL.search(source):
        return  # to parse all files takes a second
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if ast.unparse(call.func.value) != "torch" or call.func.attr not in FACTORIES:
            continue
        named = {keyword.arg for keyword in call.keywords}
        if not named & {"device", "out", None}:
            yield call.lineno


def test_every_new_tensor_names_its_device() -> None:
    places = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for line in calls_without_device(path.read_text())
    ]
    assert places == []


def test_a_missing_device_is_found() -> None:
    assert list(calls_without_device("torch.empty(0)\ntorch.full((2,), 1, device=x)\n")) == [1]
