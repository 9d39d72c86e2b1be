"""From the hashing trick: ids that shared a row get one each, which begins as the shared one was.

Right after the move the model says what it has said before, for every id that is known to occur.
What training then learns is of each id alone, so the loss falls below what hashing could reach.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_dynemb as td
from torch_dynemb import migrate

IDS, ROWS, DIM = 600, 64, 8


def hashed(ids: Tensor) -> Tensor:
    """Return the row of each id: the hashing trick."""
    return ids.abs() % ROWS


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return ids [n] and labels [n]: every id has an opinion of its own."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, IDS, (512,), generator=draw)
    return ids * 977 - 10_000, ((ids * 7919) % 3 == 0).float()


class Hashed(nn.Module):
    """Before: a table of a size chosen in advance."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.over = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.over(self.table(hashed(ids)))[:, 0]


class Dynamic(nn.Module):
    """After: the ids themselves."""

    def __init__(self, over: nn.Linear) -> None:
        super().__init__()
        self.table = td.DynamicEmbedding(DIM, optimizer=td.Adagrad(lr=0.1))
        self.over = over

    def forward(self, ids: Tensor) -> Tensor:
        return self.over(self.table(ids))[:, 0]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> float:
    """Train for some steps; return the loss of the last ten."""
    losses = []
    for step in steps:
        ids, labels = batch(step)
        loss = F.binary_cross_entropy_with_logits(model(ids), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / 10


def main() -> None:
    """Train with hashing, move, and train on."""
    torch.manual_seed(0)
    old = Hashed()
    before = train(old, [torch.optim.Adagrad(old.parameters(), lr=0.1)], range(300))

    # the move: the ids that are known to occur, such as those of the last weeks, and their rows
    known = torch.cat([batch(step)[0] for step in range(50)]).unique()
    new = Dynamic(old.over)
    migrate.load(new, migrate.read_embedding(old.table.weight[hashed(known)], known))
    ids, _ = batch(1000)
    ids = ids[torch.isin(ids, known)]
    same = torch.equal(new(ids).detach(), old(ids).detach())

    dense = torch.optim.Adagrad(new.over.parameters(), lr=0.1)
    after = train(new, [dense, new.table.optimizer], range(300, 600))
    result = {
        "same_answers": same,
        "loss_hashed": round(before, 4),
        "loss_dynamic": round(after, 4),
        "rows_hashed": ROWS,
        "rows_dynamic": len(new.table),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
