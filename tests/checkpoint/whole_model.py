"""A model with everything that a checkpoint has, and what it holds as tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from seeding import seeded
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.ops.columns import GENERATION_BITS
from torch_dynemb.table import state as table_state


class WholeModel(nn.Module):
    """Two groups of tables with every score, counts, a sketch and state, and a dense state.

    Args:
        other: with a larger capacity and rows of another dtype, so that a load gives ids and rows
            other places than they had.
        storage: of the tables by name, and of the bag; those that have none are in memory.
    """

    def __init__(self, *, other: bool = False, storage: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        where = {} if storage is None else storage
        scored = td.Policy(
            score=("frequency", "timestamp", "custom"), capacity=50 if other else 40, ttl=100
        )
        self.tables = td.DynamicEmbeddingBagCollection(
            [
                td.TableConfig("scored", 4, policy=scored, storage=where.get("scored")),
                td.TableConfig(
                    "counted",
                    4,
                    policy=td.Policy(admission=td.AdmitFrequent(2)),
                    storage=where.get("counted"),
                ),
                td.TableConfig(
                    "sketched",
                    8,
                    policy=td.Policy(admission=td.AdmitFrequentSketch(2, 64)),
                    storage=where.get("sketched"),
                ),
            ],
            optimizer=td.Adam(lr=0.1, row_steps=True),
            max_rows=200,
        )
        self.tables.group.scores.set_batch(0, 5)
        self.tables.group.clock.set_now(900)  # not this machine's clock
        self.bag = td.DynamicEmbeddingBag(
            4,
            mode="sum",
            optimizer=td.SGD(lr=0.1),
            max_rows=200,
            name="bag",
            dtype=torch.bfloat16 if other else torch.float32,
            storage=where.get("bag"),
        )
        self.dense = nn.Linear(20, 2)

    def train_steps(self, steps: range) -> None:
        """Train steps with batches that depend only on their numbers."""
        for step in steps:
            generator = seeded(step)
            ids = {
                name: torch.randint(0, 60, (10, 2), generator=generator)
                for name in self.tables.feature_names
            }
            more = self.bag(torch.randint(0, 60, (10, 2), generator=generator))
            (self.dense(torch.cat([self.tables(ids), more], 1)).sum()).backward()
            self.tables.optimizer.step(now=1000 + step)
            self.bag.optimizer.step()
            with torch.no_grad():
                for parameter in self.dense.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
        self.tables.group.erase(0, torch.arange(0, 60, 7))


def content(model: WholeModel) -> dict[str, Any]:
    """Copies of all that a model holds, but for rows that no id has."""
    result = dict(model.dense.state_dict(prefix="dense."))
    result = {name: value.clone() for name, value in result.items()}
    for kind, group in (("tables", model.tables.group), ("bag", model.bag.group)):
        state = table_state.save(group.tables)
        slabs = [slab.name for slab in group.config.slabs]
        for slab in slabs:
            free = state[f"{slab}.free_rows"] >> GENERATION_BITS
            for name in state:
                if name.startswith(f"{slab}.") and name != f"{slab}.free_rows":
                    state[name][free] = 0
        result.update((f"{kind}.{name}", value) for name, value in state.items())
    return result


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two contents are the same, bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in one.items()
    )


def whole_state(model: WholeModel) -> dict[str, Any]:
    """Copies of everything, rows that no id has included."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in model.state_dict().items()
    }


KINDS = ("empty", "empty and other", "filled", "filled and other")


def make(kind: str) -> WholeModel:
    """A model that takes rows where they were, or elsewhere, into empty or filled tables."""
    model = WholeModel(other="other" in kind)
    if "filled" in kind:
        model.train_steps(range(7, 9))
    return model


def save_trained(folder: Path) -> Path:
    """Saves a trained model with state of its program; returns the folder."""
    model = WholeModel()
    model.train_steps(range(3))
    checkpoint.save(folder, model, state={"epoch": 3, "more": torch.arange(10)})
    return folder
