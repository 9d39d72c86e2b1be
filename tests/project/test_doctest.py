"""The examples in the docstrings of torch_dynemb run as they stand."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import torch_dynemb

pytestmark = pytest.mark.cpu_only("examples, which name no device")

MODULES = [
    "torch_dynemb",
    *(
        module.name
        for module in pkgutil.walk_packages(torch_dynemb.__path__, "torch_dynemb.")
        if not module.name.rpartition(".")[2].startswith("_")
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


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
