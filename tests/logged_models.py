"""Models that publish to a delta log, random steps of training, and what the models hold."""

from __future__ import annotations

from typing import Any

import table_content
import torch
from torch import Tensor, nn

import torch_dynemb as td

IDS = 60
DIM = 4
Content = dict[Any, Any]


class Model(nn.Module):
    """Two tables of one group, one of which is full soon, one of another group, a dense part.

    Args:
        seed: of the dense part and of new rows.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        policy = td.Policy(capacity=24, score="step")
        configs = [
            td.TableConfig("a", DIM, policy=policy),
            td.TableConfig("b", DIM, initializer=td.Uniform(-1, 1)),
        ]
        self.bags = td.DynamicEmbeddingBagCollection(
            configs, optimizer=td.Adam(lr=0.1), max_rows=300
        )
        self.one = td.DynamicEmbedding(
            8, optimizer=td.Adagrad(lr=0.1), dtype=torch.bfloat16, max_rows=300
        )
        self.dense = nn.Linear(2 * DIM + 8, 1)

    def forward(self, a: Tensor, b: Tensor, one: Tensor) -> Tensor:
        parts = [self.bags({"a": a, "b": b}), self.one(one)[:, 0].float()]
        dense: Tensor = self.dense(torch.cat(parts, dim=1))
        return dense


def train(model: Model, generator: torch.Generator) -> None:
    """A training step on random ids."""

    def ids(columns: int) -> Tensor:
        drawn = torch.randint(0, IDS, (6, columns), generator=generator, device="cpu")
        return drawn.to(model.bags.group.device)

    model.zero_grad()
    model(ids(3), ids(2), ids(1)).square().sum().backward()
    model.bags.optimizer.step()
    model.one.optimizer.step()
    with torch.no_grad():
        for parameter in model.dense.parameters():
            parameter -= 0.01 * parameter.grad


def act(model: Model, generator: torch.Generator) -> None:
    """A training step, or one of the other things that change tables."""
    kind = int(torch.randint(0, 10, (), generator=generator, device="cpu"))
    ids = torch.randint(0, IDS, (8,), generator=generator, device="cpu").unique()
    ids = ids.to(model.bags.group.device)
    table = kind % 2
    if kind < 5:
        train(model, generator)
    elif kind == 5:
        model.bags.group.erase(table, ids)
    elif kind == 6:
        model.one.group.insert_or_assign(0, ids, torch.randn(ids.numel(), 8))
    elif kind == 7:
        model.bags.group.compact()
    elif kind == 8:
        model.bags.group.insert(table, ids)
    else:
        model.one.group.clear(0)


def content(model: nn.Module, *, state: bool = True) -> Content:
    """Bits of rows and of optimizer state by table and id, and of the dense part."""
    result: Content = dict(table_content.content(model, state=state))
    for name, parameter in model.named_parameters():
        if name.startswith("dense"):
            result[name] = parameter.tolist()
    return result
