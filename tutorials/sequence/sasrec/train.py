"""Training with several losses, and NDCG@10 and HR@10 of the next item after a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import torch_dynemb as td
from tutorials.sequence.sasrec.data import PADDING, PLACES, Split
from tutorials.sequence.sasrec.model import Retriever, SASRec
from tutorials.two_tower import StaticItems, ndcg

BATCH = 64  # histories
LR, DENSE_LR = 0.01, 0.002
NEGATIVES = 256
Loss = Callable[[Tensor, Tensor], Tensor]

STATIC = "nn.Embedding, all items"
LOSSES: dict[str, Callable[[td.DynamicEmbedding], nn.Module]] = {
    "256 uniform": lambda items: td.SampledSoftmaxLoss(
        items, negatives=td.UniformNegatives(NEGATIVES), temperature=1.0
    ),
    "in-batch and 256 uniform": lambda items: td.SampledSoftmaxLoss(
        items,
        negatives=(td.InBatchNegatives(), td.UniformNegatives(NEGATIVES)),
        temperature=1.0,
    ),
    "in-batch, not corrected": lambda items: td.SampledSoftmaxLoss(
        items, temperature=1.0, correction=None
    ),
}


class Quality(NamedTuple):
    """Means over the users of a split.

    Attributes:
        ndcg: NDCG@10.
        hit_rate: HR@10.
    """

    ndcg: float
    hit_rate: float


class Trainer:
    """A model with its loss and optimizers.

    Args:
        name: of the loss, in LOSSES, or STATIC.
        split: its histories have the vocabulary of the static table.
        dim: columns of a row.
    """

    def __init__(self, name: str, split: Split, dim: int) -> None:
        torch.manual_seed(0)
        steps = split.histories.shape[1]
        self.optimizers: list[torch.optim.Optimizer] = []
        self.loss: Loss
        if name == STATIC:
            known = split.histories.unique()
            static = StaticItems(known[known != PADDING], dim, temperature=1.0)
            self.model = SASRec(static, dim, steps)
            self.loss, self._search = static.loss, static.search
            rows = torch.optim.Adam(static.parameters(), lr=LR)
        else:
            items = td.DynamicEmbedding(
                dim,
                name="items",
                optimizer=td.Adam(lr=LR),
                policy=td.Policy(score="frequency"),
                padding_idx=PADDING,
                initializer=td.Uniform(-(dim**-0.5), dim**-0.5),
            )
            self.model = SASRec(items, dim, steps)
            self.loss = LOSSES[name](items)
            self._search = None
            rows = items.optimizer
        dense = [weight for name, weight in self.model.named_parameters() if "items." not in name]
        self.optimizers = [rows, torch.optim.Adam(dense, lr=DENSE_LR)]

    def epoch(self, histories: Tensor) -> None:
        """Train once on all histories, int64 [users, steps]."""
        self.model.train()
        for part in torch.randperm(len(histories)).split(BATCH):
            self.step(histories[part])

    def step(self, history: Tensor) -> None:
        """Train on some histories, int64 [B, steps]: each place predicts the next one."""
        following = history[:, 1:]
        there = following != PADDING
        query = self.model(history[:, :-1])[there]
        self.loss(query, following[there]).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def quality(self, split: Split) -> Quality:
        """Return how well the next items of a split are found among all items."""
        self.model.eval()
        search = Retriever(self.model) if self._search is None else None
        found = []
        for known in split.known.split(BATCH):
            if search is None:
                found.append(self._search(self.model.after(known), known))
            else:
                found.append(search(known)[0])
        return quality_of(torch.cat(found), split.wanted)


def quality_of(found: Tensor, wanted: Tensor) -> Quality:
    """Return the quality of rankings.

    Args:
        found: int64 [n, PLACES], ids in order.
        wanted: int64 [n].
    """
    assert found.shape[1] == PLACES
    hits = (found == wanted[:, None]).any(1).float().mean()
    return Quality(ndcg(found, wanted) / len(wanted), float(hits))


def curve(name: str, split: Split, dim: int, epochs: int) -> list[Quality]:
    """Train a model and return its quality after each epoch.

    Args:
        name: of the loss.
        split: of the ratings.
        dim: columns of a row.
        epochs: passes over the histories.
    """
    trainer = Trainer(name, split, dim)
    points = []
    for _ in range(epochs):
        trainer.epoch(split.histories)
        points.append(trainer.quality(split))
    return points
