"""Models with tables of many kinds, to be saved and loaded, and what their tables hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from loaded_content import score_words
from seeding import seeded
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.table.content import optimizer_steps, read_content, read_counts

SCORED = td.Policy(
    score=("timestamp", "frequency"), ttl=500, capacity=150, admission=td.AdmitFrequent(2)
)
SKETCHED = td.Policy(score="step", admission=td.AdmitFrequentSketch(2, memory="1KiB"))


def _dim(name: str) -> int:
    return 4 if name == "plain" else 8


class Net(nn.Module):
    """Two table modules and a dense layer."""

    def __init__(
        self,
        *,
        seed: int = 0,
        optimizer: td.optim.OptimizerConfig | None = None,
        policies: Mapping[str, td.Policy] | None = None,
        dtype: torch.dtype = torch.float32,
        split: bool = False,
        names: tuple[str, ...] = ("scored", "sketched", "plain"),
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        optimizer = td.Adam(lr=0.05) if optimizer is None else optimizer
        rules = {"scored": SCORED, "sketched": SKETCHED, **(policies or {})}
        self.features = td.DynamicEmbeddingBagCollection(
            [
                td.TableConfig(
                    name,
                    4 if name == "plain" else 8,
                    policy=rules.get(name, td.Policy()),
                    dtype=dtype,
                )
                for name in names
            ],
            optimizer=optimizer,
            split=split,
            max_rows=4096,
        )
        self.user = td.DynamicEmbedding(
            4, optimizer=optimizer, padding_idx=0, dtype=dtype, split=split, max_rows=4096
        )
        self.top = nn.Linear(sum(map(_dim, names)) + 4, 1)

    def forward(self, ids: dict[str, Tensor], users: Tensor) -> Tensor:
        result: Tensor = self.top(torch.cat([self.features(ids), self.user(users)], 1))
        return result

    @property
    def modules_with_tables(self) -> tuple[Any, ...]:
        return self.features, self.user


def train(model: Net, steps: range) -> None:
    """Train steps with batches that depend only on their numbers; ids come, are evicted, erased."""
    dense = torch.optim.SGD(model.top.parameters(), lr=0.01)
    names = model.features.group.names
    for step in steps:
        generator = seeded(step)
        ids = {
            name: torch.randint(-9, 60 + 20 * step, (32, 3), generator=generator) for name in names
        }
        users = torch.randint(0, 40 + step, (32,), generator=generator)
        dense.zero_grad()
        model(ids, users).sigmoid().sum().backward()
        dense.step()
        times = model.features.group.config.keeps_time
        model.features.optimizer.step(now=100 + step if times else None)
        model.user.optimizer.step()
        if step % 4 == 3:
            model.features.group.erase(len(names) - 1, torch.arange(0, 60, 7))


class TableContents(NamedTuple):
    """What a table holds, apart from where."""

    ids: list[int]
    rows: Tensor
    state: dict[str, Tensor]
    scores: Tensor
    score_names: tuple[str, ...]
    counts: dict[int, int] | None
    steps: int


def contents(model: Net) -> dict[str, TableContents]:
    """By name of the table."""
    found = {}
    for module in model.modules_with_tables:
        module.group.materialize()
        tables = module.group.tables
        for t, name in enumerate(module.group.names):
            content, counted = read_content(tables, t), read_counts(tables, t)
            found[name if module is model.features else "user"] = TableContents(
                content.ids.tolist(),
                content.rows,
                content.state,
                score_words(content),
                tuple(content.scores),
                None
                if counted is None
                else dict(zip(counted.ids.tolist(), counted.counts.tolist(), strict=True)),
                optimizer_steps(tables, t),
            )
    return found


def differences(one: Any, two: Any, path: str = "") -> list[str]:
    """Names what differs, tensors by value."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        same = one.dtype == two.dtype and torch.equal(one.cpu(), two.cpu())
        return [] if same else [path]
    if isinstance(one, dict) and isinstance(two, dict):
        if one.keys() != two.keys():
            return [f"{path} has {list(one)} and {list(two)}"]
        return [d for key in one for d in differences(one[key], two[key], f"{path}.{key}")]
    if isinstance(one, tuple) and isinstance(two, tuple) and hasattr(one, "_fields"):
        return differences(one._asdict(), two._asdict(), path)
    return [] if one == two else [f"{path} is {one} and {two}"]
