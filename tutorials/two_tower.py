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
        ids: int64 [items], the vocabulary.
        dim: columns of a row.
        temperature: divisor of the scores.
    """

    def __init__(self, ids: Tensor, dim: int, temperature: float = TEMPERATURE) -> None:
        super().__init__()
        self.ids = ids.sort().values
        self.temperature = temperature
        self.rows = nn.Embedding(len(ids), dim)
        nn.init.uniform_(self.rows.weight, -(dim**-0.5), dim**-0.5)

    def numbers(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return row numbers of ids of any shape, and which ids are known."""
        numbers = torch.searchsorted(self.ids, ids.contiguous()).clamp(max=len(self.ids) - 1)
        return numbers, self.ids[numbers] == ids

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, zeros for those that are unknown."""
        numbers, known = self.numbers(ids)
        rows: Tensor = self.rows(numbers) * known[..., None]
        return rows

    def loss(self, query: Tensor, ids: Tensor) -> Tensor:
        """Return the cross entropy of queries against all rows."""
        scores = query @ self.rows.weight.t() / self.temperature
        return F.cross_entropy(scores, self.numbers(ids)[0])

    def search(self, query: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the ids of the largest scores, without those that a query has seen."""
        scores = query @ self.rows.weight.t()
        if seen is not None:
            numbers, known = self.numbers(seen)
            scores.scatter_add_(1, numbers, torch.where(known, -torch.inf, 0.0))
        return self.ids[scores.topk(PLACES).indices]


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
        static = StaticItems(data.item_ids, dim)
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
