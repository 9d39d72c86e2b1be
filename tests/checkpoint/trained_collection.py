"""A collection that has been trained: ids have come, the index has grown, ids have left."""

from __future__ import annotations

from typing import Any

import torch
from seeding import seeded

import torch_dynemb as td
from torch_dynemb.optim import OptimizerConfig

TABLES = ("a", 4), ("b", 8), ("c", 4)


def collection(
    optimizer: OptimizerConfig | None = None, *, seed: int = 0, **arguments: Any
) -> td.DynamicEmbeddingBagCollection:
    torch.manual_seed(seed)
    return td.DynamicEmbeddingBagCollection(
        [td.TableConfig(name, dim) for name, dim in TABLES],
        optimizer=td.Adam(lr=0.01) if optimizer is None else optimizer,
        **arguments,
    )


def train(module: td.DynamicEmbeddingBagCollection, steps: range, ids: int = 40) -> None:
    """Train steps with batches that depend only on their numbers; the index grows."""
    for step in steps:
        generator = seeded(step)
        features = {
            name: torch.randint(0, 30 * (step + 1), (ids, 2), generator=generator)
            for name, _ in TABLES
        }
        output = module(features)
        (output * torch.randn(output.shape, generator=generator)).sum().backward()
        module.optimizer.step()
        if step % 3 == 2:
            module.group.erase(step % 2, torch.arange(0, 30 * step, 7))


def used() -> td.DynamicEmbeddingBagCollection:
    module = collection()
    train(module, range(4))
    module({name: torch.arange(900, 910)[None] for name, _ in TABLES})  # no backward yet
    for table in range(len(TABLES)):
        module.group.erase(table, next(module.group.export(table)).ids[:6])
    return module
