"""Recall of two towers on MovieLens by initial values, of ``nn.Embedding`` and of dynamic tables.

``build/programs/bin/python tests/programs/two_tower_run.py 3`` prints a line of JSON for each
optimizer: the recall@20 of three seeds, by table and initializer. The data are RecBole's sample,
ml-100k. The last tenth of each user's ratings is predicted among the items that the user has not
rated before. ``nn.Embedding`` has three initializers, dynamic tables have their default. The best
of three learning rates counts, by its mean.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from deepfm_run import read
from torch import Tensor, nn

import torch_dynemb as td

DIM, BATCH, EPOCHS, LAST = 32, 256, 5, 20
INITIALIZERS: dict[str, Callable[[Tensor], object]] = {
    "Normal(0, 1)": lambda weight: nn.init.normal_(weight),
    "Normal(0, 0.1)": lambda weight: nn.init.normal_(weight, std=0.1),
    "Normal(0, 0.01)": lambda weight: nn.init.normal_(weight, std=0.01),
}
DYNAMIC = "dynamic, default"
RATES = {"Adam": (0.001, 0.003, 0.01), "Adagrad": (0.03, 0.1, 0.3)}


class Ratings(NamedTuple):
    """Pairs of a user and an item.

    Attributes:
        train, test: int64 [n, 2], numbers of user and item.
        users, items: how many there are.
    """

    train: Tensor
    test: Tensor
    users: int
    items: int


def ratings() -> Ratings:
    """Read MovieLens; hold out the last tenth of each user's ratings."""
    rows = sorted(read("inter"), key=lambda row: float(row["timestamp"]))
    numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
    of_users: list[list[list[int]]] = []
    for row in rows:
        user, item = (
            of.setdefault(row[name], len(of))
            for of, name in zip(numbers, ("user_id", "item_id"), strict=True)
        )
        if user == len(of_users):
            of_users.append([])
        of_users[user].append([user, item])
    kept = [math.ceil(0.9 * len(of)) for of in of_users]
    parts = (
        [pair for of, n in zip(of_users, kept, strict=True) for pair in of[:n]],
        [pair for of, n in zip(of_users, kept, strict=True) for pair in of[n:]],
    )
    train, test = map(torch.tensor, parts)
    return Ratings(train, test, *map(len, numbers))


def recall(users: nn.Module, items: nn.Module, data: Ratings) -> float:
    """Return the mean over users of the part of held-out items among the 20 best."""
    with torch.no_grad():
        scores = users(torch.arange(data.users)) @ items(torch.arange(data.items)).T
    scores[data.train[:, 0], data.train[:, 1]] = -math.inf
    wanted = torch.zeros_like(scores)
    wanted[data.test[:, 0], data.test[:, 1]] = 1.0
    hits = wanted.gather(1, scores.topk(LAST).indices).sum(1)
    counts = wanted.sum(1)
    return float((hits / counts)[counts > 0].mean())


def trained(data: Ratings, tables: str, optimizer: str, rate: float, seed: int) -> float:
    """Train an in-batch softmax, corrected by popularity; return the recall.

    Args:
        data: ratings.
        tables: a name in INITIALIZERS, or DYNAMIC.
        optimizer: ``"Adam"`` or ``"Adagrad"``.
        rate: of learning.
        seed: of initial values and of the order.
    """
    torch.manual_seed(seed)
    towers = nn.ModuleList()
    for name, count in (("users", data.users), ("items", data.items)):
        if tables == DYNAMIC:
            config = getattr(td, optimizer)(lr=rate)
            towers.append(td.DynamicEmbedding(DIM, name=name, optimizer=config))
        else:
            towers.append(nn.Embedding(count, DIM))
            INITIALIZERS[tables](towers[-1].weight)
    steps = td.table_optimizers(towers)
    if tables != DYNAMIC:
        steps = [getattr(torch.optim, optimizer)(towers.parameters(), lr=rate)]
    prior = torch.bincount(data.train[:, 1], minlength=data.items).float().add(1.0).log()
    for _ in range(EPOCHS):
        for part in data.train[torch.randperm(len(data.train))].split(BATCH):
            user, item = part.T
            logits = towers[0](user) @ towers[1](item).T - prior[item]
            same = (item[:, None] == item) & ~torch.eye(len(part), dtype=torch.bool)
            logits = logits.masked_fill(same, -math.inf)
            for step in steps:
                step.zero_grad()
            F.cross_entropy(logits, torch.arange(len(part))).backward()
            for step in steps:
                step.step()
    return recall(*towers.eval(), data)


def best(data: Ratings, tables: str, optimizer: str, seeds: Sequence[int]) -> list[float]:
    """Return the recall of each seed, with the learning rate of the highest mean."""
    found = [
        [trained(data, tables, optimizer, rate, seed) for seed in seeds]
        for rate in RATES[optimizer]
    ]
    return max(found, key=sum)


if __name__ == "__main__":
    torch.set_num_threads(1)
    movielens = ratings()
    for chosen in sys.argv[2:] or RATES:
        values = {
            name: best(movielens, name, chosen, range(int(sys.argv[1])))
            for name in (*INITIALIZERS, DYNAMIC)
        }
        print(json.dumps({"optimizer": chosen, **values}), flush=True)
