"""Calls of torch that a training step makes in eager mode: each is a launch or more on a GPU.

The count includes every op that the dispatcher runs below autograd, from any caller. Views (ops
that return a part of an argument) launch nothing and have their own count. The two ``profiler``
calls around the ``step`` of every optimizer are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("compilers and their view of ops")


class Recorder(TorchDispatchMode):
    """Names of the calls within it: those that launch kernels, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.launching: list[str] = []
        self.views: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace != "profiler":
            aliases = [result.alias_info for result in func._schema.returns]
            is_view = any(alias is not None and not alias.is_write for alias in aliases)
            (self.views if is_view else self.launching).append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


class Calls(NamedTuple):
    """Of forward and backward, and how many views were among them; then those of ``step()``."""

    launching: list[str]
    views: int
    step: list[str]


def calls_of_a_step(module: Any, *arguments: Any) -> Calls:
    for _ in range(2):  # the first may differ
        with Recorder() as training:
            output = module(*arguments)
        outputs = list(output.values()) if isinstance(output, dict) else [output]
        gradients = [torch.ones(tensor.shape) for tensor in outputs]
        with training:
            torch.autograd.backward(outputs, gradients)
        with Recorder() as stepping:
            module.optimizer.step()
    return Calls(training.launching, len(training.views), stepping.launching + stepping.views)


FLAT = torch.arange(12)
DENSE = FLAT.reshape(3, 4)
ENDS = torch.tensor([0, 5, 8, 12])
TABLES = [td.TableConfig("a", 4, ["f", "g"]), td.TableConfig("b", 4, ["h"])]
JAGGED = td.KeyedJagged(["f", "g", "h"], FLAT, torch.tensor([0, 2, 3, 4, 7, 9, 12]))


def embedding() -> td.DynamicEmbedding:
    return td.DynamicEmbedding(4, optimizer=td.Adam(lr=0.1))


def bag(*, last: bool = False) -> td.DynamicEmbeddingBag:
    return td.DynamicEmbeddingBag(
        4, mode="sum", optimizer=td.Adam(lr=0.1), include_last_offset=last
    )


def bags() -> td.DynamicEmbeddingBagCollection:
    return td.DynamicEmbeddingBagCollection(TABLES, optimizer=td.Adam(lr=0.1))


LOOKUP = ["find_or_insert_", "embedding", "embedding_backward_"]


@pytest.mark.parametrize(
    ("make", "arguments", "launching", "views"),
    [
        # what needs no conversion: three calls, and no view
        (embedding, (FLAT,), LOOKUP, 0),
        (lambda: bag(last=True), (FLAT, ENDS), LOOKUP, 0),
        (bags, (JAGGED,), LOOKUP, 0),
        # views of ids, rows and the gradient
        (embedding, (DENSE,), LOOKUP, 3),
        # what is converted: one more
        (embedding, (FLAT.int(),), ["_to_copy", *LOOKUP], 0),
        (bag, (FLAT, ENDS[:-1]), ["constant_pad_nd", *LOOKUP], 0),
        (bag, (DENSE,), ["ids_concat", *LOOKUP], 0),
        (bag, (FLAT.int(), ENDS[:-1].int()), ["ids_concat", *LOOKUP], 0),
        (
            bags,
            (td.KeyedJagged(JAGGED.keys(), FLAT.int(), JAGGED.offsets().int()),),
            ["ids_concat", *LOOKUP],
            0,
        ),
        (bags, ({"f": DENSE, "g": (FLAT, ENDS), "h": DENSE.int()},), ["ids_concat", *LOOKUP], 0),
    ],
)
def test_forward_and_backward(
    make: Callable[[], Any], arguments: tuple[Any, ...], launching: list[str], views: int
) -> None:
    calls = calls_of_a_step(make(), *arguments)
    assert calls == Calls(launching, views, ["end_step_"])


@pytest.mark.parametrize("features", [2, 20])
def test_sequences_of_any_number_of_features(features: int) -> None:
    """Also one split of the rows, into views without a base, and a cat of their gradients."""
    names = [f"feature {f}" for f in range(features)]
    collection = td.DynamicEmbeddingCollection(
        [td.TableConfig("items", 4, names)], optimizer=td.Adam(lr=0.1)
    )
    ids: dict[str, Tensor] = {name: FLAT[: 2 + f % 3] for f, name in enumerate(names)}
    calls = calls_of_a_step(collection, ids)
    launching = ["ids_concat", *LOOKUP[:2], "unsafe_split_with_sizes", "cat", LOOKUP[2]]
    assert calls == Calls(launching, 0, ["end_step_"])


def test_step_with_scores() -> None:
    """The time is part of the same call."""
    policy = td.Policy(score=("timestamp", "frequency"), capacity=100, ttl=10)
    module = td.DynamicEmbedding(4, optimizer=td.Adam(lr=0.1), policy=policy)
    assert calls_of_a_step(module, FLAT) == Calls(LOOKUP, 0, ["end_step_"])


def test_split_mode() -> None:
    module = td.DynamicEmbedding(4, optimizer=td.Adam(lr=0.1), split=True)
    calls = calls_of_a_step(module, FLAT)
    assert calls.launching == ["find_or_insert_", "embedding", "accumulate_grad_"]
    views = ["slice", "select"]  # of the update count, and of the numbers of gradients
    assert calls.step == ["merge_grad_", "apply_grad_", "zero_", "end_step_", *views]
