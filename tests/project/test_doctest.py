"""The examples in the docstrings of torch_dynemb run as they stand."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import torch_dynemb
from torch_dynemb.nn import torch_changes

pytestmark = pytest.mark.cpu_only("examples, which name no device")

MODULES = [
    "torch_dynemb",
    *(
        module.name
        for module in pkgutil.walk_packages(torch_dynemb.__path__, "torch_dynemb.")
        if not module.name.rpartition(".")[2].startswith("_")
    ),
]


@pytest.fixture
def changes_of_torch() -> Iterator[None]:
    """Take the example of restore_torch back; it would hold for all later tests."""
    yield
    torch_changes._restored.clear()


@pytest.mark.page
@pytest.mark.usefixtures("changes_of_torch")
@pytest.mark.parametrize("room", sorted({".".join(name.split(".")[:2]) for name in MODULES}))
def test_examples_run(room: str) -> None:
    """A room at once, which prints what fails and where: most modules have no example."""
    names = [name for name in MODULES if f"{name}.".startswith(f"{room}.")]
    if room == "torch_dynemb":
        names = [room]
    failed = [name for name in names if doctest.testmod(importlib.import_module(name)).failed]
    assert failed == []


@pytest.mark.parametrize(
    "name",
    [
        "DynamicEmbedding",
        "DynamicEmbeddingBag",
        "DynamicEmbeddingBagCollection",
        "DynamicEmbeddingCollection",
        "freeze",
    ],
)
def test_what_users_meet_first_has_an_example(name: str) -> None:
    example = doctest.DocTestFinder(recurse=False).find(getattr(torch_dynemb, name), name)
    assert any(test.examples for test in example)
