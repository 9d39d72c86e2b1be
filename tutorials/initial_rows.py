"""Recall of a two-tower model by initializer, optimizer and dim.

    python -m tutorials.initial_rows                # a few minutes on two cores; --json for lines

Users and items have planted factors, items have a popularity, and a user's interactions come in
the order of time. Both towers are dynamic tables, and the loss is an in-batch softmax, corrected
by popularity. The last tenth of the interactions is predicted: recall@20 among all items, of users
and items as they come, so some are new. For each initializer, the best of three learning rates
counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_dynemb as td

INITIALIZERS: dict[str, Callable[[int], td.Initializer]] = {
    "Normal(0, 1)": lambda dim: td.Normal(),
    "Normal(0, 0.1)": lambda dim: td.Normal(0.0, 0.1),
    "Normal(0, 0.01)": lambda dim: td.Normal(0.0, 0.01),
    "Normal(0, 1/sqrt(dim))": lambda dim: td.Normal(0.0, dim**-0.5),
    "Uniform(1/sqrt(dim))": lambda dim: td.Uniform(-(dim**-0.5), dim**-0.5),
    "Uniform(1/dim)": lambda dim: td.Uniform(-1 / dim, 1 / dim),
    "Uniform(0.05)": lambda dim: td.Uniform(-0.05, 0.05),
}
OPTIMIZERS: dict[str, Callable[[float], td.optim.OptimizerConfig]] = {
    "SGD": lambda scale: td.SGD(lr=3.0 * scale),
    "Adagrad": lambda scale: td.Adagrad(lr=0.1 * scale),
    "RowWiseAdagrad": lambda scale: td.RowWiseAdagrad(lr=0.1 * scale),
    "Adam": lambda scale: td.Adam(lr=0.005 * scale),
}
SCALES = (0.3, 1.0, 3.0)
BATCH = 256
LAST = 20  # of recall@20


class Interactions(NamedTuple):
    """Interactions in the order of time.

    Attributes:
        users, items: int64 [n]; numbers.
        item_ids: int64 [items], the id of each item's number.
        popularity: float [items], sums to 1.
    """

    users: Tensor
    items: Tensor
    item_ids: Tensor
    popularity: Tensor


def generate(users: int, items: int, count: int, factors: int = 12) -> Interactions:
    """Return interactions that follow planted factors and popularity.

    Args:
        users, items, count: how many there are.
        factors: columns of what is planted.
    """
    draw = torch.Generator().manual_seed(0)
    taste = torch.randn(users, factors, generator=draw)
    kind = torch.randn(items, factors, generator=draw) * 0.7
    popularity = (1.0 / torch.arange(1, items + 1) ** 0.8).log()
    chances = (taste @ kind.T + popularity).softmax(1)
    users_of = torch.randint(0, users, (count,), generator=draw)
    # users come in over time: the first half of the time has half of them
    seen = torch.arange(count).float().div(count).add(0.5).clamp(max=1.0).mul(users)
    users_of = (users_of % seen.long().clamp(min=1)).long()
    chosen = torch.empty(count, dtype=torch.int64)
    for part in torch.arange(count).split(1 << 14):
        chosen[part] = torch.multinomial(chances[users_of[part]], 1, generator=draw).flatten()
    ids = torch.randint(1 << 62, (items,), generator=draw)
    counts = torch.bincount(chosen, minlength=items).float() + 1.0
    return Interactions(users_of, chosen, ids, counts / counts.sum())


def recall(
    data: Interactions, dim: int, initializer: td.Initializer, optimizer: td.optim.OptimizerConfig
) -> float:
    """Return recall@20 on the last tenth, after training on what came before.

    Args:
        data: interactions.
        dim: columns of both towers.
        initializer, optimizer: of both tables.
    """
    torch.manual_seed(0)
    towers = [
        td.DynamicEmbedding(dim, name=name, initializer=initializer, optimizer=optimizer)
        for name in ("users", "items")
    ]
    users, items = towers
    trained = data.users.numel() * 9 // 10
    prior = data.popularity.log()
    for _ in range(3):
        for part in torch.randperm(trained).split(BATCH):
            chosen = data.items[part]
            logits = users(data.users[part]) @ items(data.item_ids[chosen]).T - prior[chosen]
            # the same item twice in a batch is not a negative
            same = (chosen[:, None] == chosen) & ~torch.eye(len(part), dtype=torch.bool)
            logits = logits.masked_fill(same, -math.inf)
            F.cross_entropy(logits, torch.arange(len(part))).backward()
            for tower in towers:
                tower.optimizer.step()
    users.eval(), items.eval()
    found = 0
    for part in torch.arange(trained, data.users.numel()).split(BATCH):
        scores = users(data.users[part]) @ items(data.item_ids).T
        best = scores.topk(LAST, 1).indices
        found += int((best == data.items[part][:, None]).sum())
    return found / (data.users.numel() - trained)


def main() -> None:
    """Print the best recall of each initializer by optimizer and dim."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--users", type=int, default=800)
    arguments.add_argument("--items", type=int, default=600)
    arguments.add_argument("--interactions", type=int, default=24_000)
    arguments.add_argument("--dims", type=int, nargs="+", default=[8, 32, 64])
    arguments.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    arguments.add_argument("--json", action="store_true", help="one JSON line per case, no table")
    chosen = arguments.parse_args()
    data = generate(chosen.users, chosen.items, chosen.interactions)
    if not chosen.json:
        print(f"{'recall@20':26s}" + "".join(f"{name:>16s}" for name in INITIALIZERS))
    for optimizer, dim in itertools.product(chosen.optimizers, chosen.dims):
        results = {
            name: max(
                recall(data, dim, make(dim), OPTIMIZERS[optimizer](scale)) for scale in SCALES
            )
            for name, make in INITIALIZERS.items()
        }
        if chosen.json:
            print(json.dumps({"optimizer": optimizer, "dim": dim, **results}), flush=True)
        else:
            values = "".join(f"{value:16.3f}" for value in results.values())
            print(f"{optimizer:20s} D={dim:<4d}{values}", flush=True)


if __name__ == "__main__":
    main()
