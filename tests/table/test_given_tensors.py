"""Tensors that public methods return are copies: a program that changes them changes no table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from group_calls import differences, snapshot
from torch import Tensor

import torch_dynemb as td

pytestmark = pytest.mark.any_device

IDS = torch.arange(5)
POLICY = td.Policy(score=("timestamp", "frequency"), ttl=1000, capacity=50)


def trained() -> td.DynamicEmbedding:
    module = td.DynamicEmbedding(
        4, name="t", optimizer=td.Adam(lr=0.1), policy=POLICY, max_rows=100, split=True
    )
    for _ in range(2):
        module(torch.arange(20)).sum().backward()
        module.optimizer.step()
    module(IDS).sum().backward()
    return module


def tensors_in(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from tensors_in(list(given.values()))
    elif isinstance(given, list | tuple):
        for part in given:
            yield from tensors_in(part)


GIVEN: dict[str, Callable[[td.DynamicEmbedding], Any]] = {
    "param_groups": lambda m: [
        {name: of for name, of in group.items() if name != "params"}
        for group in m.optimizer.param_groups
    ],
    "optimizer.state_dict": lambda m: m.optimizer.state_dict(),
    "state_dict": lambda m: m.state_dict(),
    "group.state.tensors": lambda m: m.group.state.tensors(),
    "named_parameters": lambda m: [p.detach() for p in m.parameters()],
    "ids": lambda m: m.ids(),
    "to_embedding": lambda m: [m.to_embedding()[0].weight.detach(), m.to_embedding()[1]],
    "group.read": lambda m: m.group.read(0, IDS),
    "group.scores.get": lambda m: [
        m.group.scores.get(0, IDS, score=score).scores for score in ("timestamp", "frequency")
    ],
    "group.export": lambda m: [[b.ids, b.rows, b.scores] for b in m.group.export(0)],
    "group.find": lambda m: list(m.group.find(IDS, torch.tensor([0, 5]), [0])),
    "group.sample_ids": lambda m: list(m.group.sample_ids(0, 5, by="frequency")),
    "lookup": lambda m: [m(IDS).detach(), m.eval()(IDS)],
}


@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN.keys())
def test_tensors_are_copies(give: Callable[[td.DynamicEmbedding], Any]) -> None:
    module = trained()
    given = list(tensors_in(give(module)))
    before = snapshot(module.group)
    for tensor in given:
        tensor.zero_()
        tensor.add_(1)
    assert differences(snapshot(module.group), before) == []
