"""Activation checkpointing runs a forward again: policies meet its ids once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torch_dynemb as td

pytestmark = pytest.mark.any_device

Run = Callable[[Tensor, Tensor], Tensor]


def reentrant(run: Run, *arguments: Tensor) -> Tensor:
    result: Tensor = checkpoint(run, *arguments, use_reentrant=True)
    return result


def not_reentrant(run: Run, *arguments: Tensor) -> Tensor:
    # the marked device does not stay the default one where a recomputation recomputes
    result: Tensor = checkpoint(run, *arguments, use_reentrant=False, determinism_check="none")
    return result


def with_hooks_inside(run: Run, *arguments: Tensor) -> Tensor:
    def saving(*arguments: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return run(*arguments)

    return not_reentrant(saving, *arguments)


def in_sequence(*, use_reentrant: bool) -> Callable[..., Tensor]:
    def call(run: Run, ids: Tensor, shift: Tensor) -> Tensor:
        parts = [lambda shift: run(ids, shift), lambda x: 1 * x]
        result: Tensor = checkpoint_sequential(parts, 2, shift, use_reentrant=use_reentrant)
        return result

    return call


def nested(outer: Callable[..., Tensor], inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(run: Run, *arguments: Tensor) -> Tensor:
        return outer(lambda *given: 1 * inner(run, *given), *arguments)

    return call


CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "not reentrant": not_reentrant,
    "reentrant": reentrant,
    "hooks inside": with_hooks_inside,
    "sequential": in_sequence(use_reentrant=False),
    "sequential reentrant": in_sequence(use_reentrant=True),
    "reentrant in reentrant": nested(reentrant, reentrant),
    "reentrant in not": nested(not_reentrant, reentrant),
    "not in reentrant": nested(reentrant, not_reentrant),
    "not in not": nested(not_reentrant, not_reentrant),
}


@pytest.mark.parametrize("eval_default", ["initial", "zeros"])
def test_the_forward_without_grad_reads_as_evaluation_does(eval_default: Any) -> None:
    policy = td.Policy(score="frequency")
    module = td.DynamicEmbedding(
        4, optimizer=td.SGD(lr=0.1), policy=policy, eval_default=eval_default
    )
    ids, shift = torch.arange(3), torch.zeros(1, requires_grad=True)
    evaluated = module.eval()(ids)
    module.train()
    output = reentrant(lambda ids, shift: module(ids) + shift, ids, shift)
    assert torch.equal(output, evaluated)
    assert len(module) == 0
    output.sum().backward()
    assert len(module) == 3


@pytest.mark.parametrize("hooks", [False, True], ids=["", "all saved on the CPU"])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_activation_checkpointing_counts_and_trains_once(how: str, hooks: bool) -> None:
    policy = td.Policy(score="frequency", admission=td.AdmitFrequent(2), refused="zeros")
    results = []
    for checkpointed in (False, True):
        module = td.DynamicEmbedding(4, name="t", optimizer=td.SGD(lr=0.1), policy=policy)
        layer = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.eye_(layer.weight)

        def run(ids: Tensor, shift: Tensor, module: Any = module, layer: Any = layer) -> Tensor:
            result: Tensor = layer(module(ids)).square() + shift
            return result

        for _ in range(2):
            # reentrant checkpointing wants an input that has a gradient
            arguments = torch.tensor([1, 1, 2]), torch.zeros(1, requires_grad=True)
            with torch.autograd.graph.save_on_cpu() if hooks else nullcontext():
                output = CHECKPOINTS[how](run, *arguments) if checkpointed else run(*arguments)
                output.sum().backward()
            module.optimizer.step()
        # the second of two occurrences admits an id
        assert module.group.scores.get(0, torch.tensor([1, 2])).scores.tolist() == [4, 2]
        assert module.group.usage.tables()["t"].not_admitted == 1
        results.append((layer.weight.grad, module.group.read(0, torch.tensor([1, 2]))))
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_a_lookup_in_the_backward_of_an_own_function_raises() -> None:
    """It may be the first of its ids, as in reentrant checkpointing, or the second."""
    policy = td.Policy(score="frequency")
    module = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), policy=policy)
    ids = torch.tensor([1, 2])

    class Repeats(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return module(ids).sum() + x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            with torch.enable_grad():
                module(ids).sum().backward()
            return grads

    output = Repeats.apply(torch.zeros(1, requires_grad=True))  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"DynamicEmbedding: .* use torch\.utils\.checkpoint"):
        output.backward()
    assert len(module) == 0
