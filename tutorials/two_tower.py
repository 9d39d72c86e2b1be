"""Two towers without a vocabulary: which negatives, and what the correction is worth.

    python -m tutorials.two_tower        # a minute on two cores; --json for lines

Users and items have planted factors, items have a popularity, and interactions come in the order
of time, as in tutorials/initial_rows.py. The last tenth is predicted: NDCG@10 of an exact search
among all items. The baseline is a static item table with a softmax over its vocabulary.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_dynemb as td
from tutorials.initial_rows import Interactions, generate

BATCH, PLACES, TEMPERATURE = 256, 10, 0.3
LR = 0.02
Step = Callable[[Tensor, Tensor], Tensor]


class StaticItems(nn.Module):
    """Items with a vocabulary: row numbers, and a score of each.

    Args:
        data: which has the ids.
        dim: columns of a row.
    """

    def __init__(self, data: Interactions, dim: int) -> None:
        super().__init__()
        self.ids, self.order = data.item_ids.sort()
        self.rows = nn.Embedding(len(self.ids), dim)
        nn.init.uniform_(self.rows.weight, -(dim**-0.5), dim**-0.5)

    def loss(self, query: Tensor, ids: Tensor) -> Tensor:
        """Return the cross entropy of queries against all rows."""
        scores = query @ self.rows.weight.t() / TEMPERATURE
        return F.cross_entropy(scores, torch.searchsorted(self.ids, ids))

    def search(self, query: Tensor) -> Tensor:
        """Return the ids of the largest scores."""
        return self.ids[(query @ self.rows.weight.t()).topk(PLACES).indices]


def dynamic_items(dim: int) -> td.DynamicEmbedding:
    """Return items without a vocabulary."""
    counted = td.Policy(score="frequency")
    return td.DynamicEmbedding(dim, name="items", optimizer=td.Adam(lr=LR), policy=counted)


LOSSES: dict[str, Callable[[td.DynamicEmbedding], nn.Module]] = {
    "all items": lambda items: td.FullSoftmaxLoss(items, temperature=TEMPERATURE),
    "256 uniform": lambda items: td.SampledSoftmaxLoss(
        items, negatives=td.UniformNegatives(256), temperature=TEMPERATURE
    ),
    "256 by frequency": lambda items: td.SampledSoftmaxLoss(
        items, negatives=td.FrequencyNegatives(256), temperature=TEMPERATURE
    ),
    "in-batch": lambda items: td.SampledSoftmaxLoss(items, temperature=TEMPERATURE),
    "in-batch and 256 uniform": lambda items: td.SampledSoftmaxLoss(
        items,
        negatives=(td.InBatchNegatives(), td.UniformNegatives(256)),
        temperature=TEMPERATURE,
    ),
    "in-batch, not corrected": lambda items: td.SampledSoftmaxLoss(
        items, temperature=TEMPERATURE, correction=None
    ),
}
STATIC = "static, all items"


def ndcg(found: Tensor, wanted: Tensor) -> float:
    """Return the sum of NDCG@10 with one right id for each query.

    Args:
        found: int64 [n, 10], ids in order.
        wanted: int64 [n].
    """
    ranks = torch.arange(2, PLACES + 2).log2()
    return float(((found == wanted[:, None]) / ranks).sum())


def trained(data: Interactions, dim: int, epochs: int, name: str) -> float:
    """Return NDCG@10 on the last tenth, after training on what came before.

    Args:
        data: interactions.
        dim: columns of both towers.
        epochs: passes over the data.
        name: of the loss, in LOSSES, or STATIC.
    """
    torch.manual_seed(0)
    users = td.DynamicEmbedding(dim, name="users", optimizer=td.Adam(lr=LR))
    optimizers: list[torch.optim.Optimizer] = [users.optimizer]
    step: Step
    search: Callable[[Tensor], Tensor]
    if name == STATIC:
        static = StaticItems(data, dim)
        optimizers.append(torch.optim.Adam(static.parameters(), lr=LR))
        step, search = static.loss, static.search
    else:
        items = dynamic_items(dim)
        optimizers.append(items.optimizer)
        step = LOSSES[name](items)

        def search(query: Tensor) -> Tensor:
            return td.top_k(query, items, PLACES).ids

    count = data.users.numel() * 9 // 10
    for _ in range(epochs):
        for part in torch.randperm(count).split(BATCH):
            step(users(data.users[part]), data.item_ids[data.items[part]]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    users.eval()
    last = torch.arange(count, data.users.numel())
    total = 0.0
    with torch.no_grad():
        for part in last.split(BATCH):
            found = search(users(data.users[part]))
            total += ndcg(found, data.item_ids[data.items[part]])
    return total / len(last)


def main() -> None:
    """Print NDCG@10 by loss."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--users", type=int, default=800)
    arguments.add_argument("--items", type=int, default=2000)
    arguments.add_argument("--interactions", type=int, default=60_000)
    arguments.add_argument("--dim", type=int, default=32)
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--json", action="store_true", help="one JSON line per loss, no table")
    chosen = arguments.parse_args()
    data = generate(chosen.users, chosen.items, chosen.interactions)
    if not chosen.json:
        print(f"{'NDCG@10':28s}{'':8s}of the static table's")
    baseline = 0.0
    for name in (STATIC, *LOSSES):
        value = trained(data, chosen.dim, chosen.epochs, name)
        baseline = baseline or value
        if chosen.json:
            print(json.dumps({"loss": name, "ndcg": value}), flush=True)
        else:
            print(f"{name:28s}{value:8.4f}{value / baseline:12.3f}", flush=True)


if __name__ == "__main__":
    main()
