"""Modules that reject a state and stay unchanged; a module with state entries of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_dynemb as td


def assert_refuses(
    module: Any, state: dict[str, Any], message: str, *, strict: bool = True
) -> None:
    before = module.state_dict()
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state, strict=strict)
    after = module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def full_of_policies() -> td.DynamicEmbedding:
    """A table with every score, counts of ids, and steps of rows."""
    policy = td.Policy(
        score=("custom", "timestamp", "frequency"),
        capacity=30,
        ttl=100,
        admission=td.AdmitFrequent(2),
    )
    optimizer = td.Adam(lr=0.1, row_steps=True)
    module = td.DynamicEmbedding(4, optimizer=optimizer, policy=policy, name="t", max_rows=100)
    module.group.scores.set_batch(0, 3)
    for ids in (torch.arange(20).repeat(2), torch.arange(10, 40)):
        module(ids).sum().backward()
        module.optimizer.step(now=50)
    module.group.erase(0, torch.tensor([2, 3]))
    return module
