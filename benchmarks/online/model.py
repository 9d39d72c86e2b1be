"""The model of ``freshness.py``: what it counts shows whether events were lost."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torch_dynemb as td

CANARIES = (-1, -2)  # ids that each batch has once


class Model(nn.Module):
    """Counts of ids, and a part that learns.

    A row of ``counts`` is the number of its id's events: SGD with lr 1, and gradients of -1.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counts = td.DynamicEmbedding(
            1, name="counts", initializer=td.Constant(0.0), optimizer=td.SGD(lr=1.0)
        )
        self.items = td.DynamicEmbedding(64, name="items", optimizer=td.Adam(lr=0.01))
        self.dense = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
        self.register_buffer("events", torch.zeros((), dtype=torch.int64))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return counts, scores, and how many events and batches were trained."""
        return self.counts(ids)[:, 0], self.dense(self.items(ids)), self.events, self.batches


class Training:
    """A model with its optimizers."""

    def __init__(self) -> None:
        self.model = Model()
        self.dense_optimizer = torch.optim.Adam(self.model.dense.parameters(), lr=0.01)
        self._canaries = torch.tensor(CANARIES)

    def step(self, ids: Tensor) -> None:
        """Train on a batch of events."""
        model = self.model
        counted = model.counts(torch.cat([ids, self._canaries])).sum()
        loss = model.dense(model.items(ids)).square().mean() - counted
        self.dense_optimizer.zero_grad()
        loss.backward()
        for optimizer in (self.dense_optimizer, model.items.optimizer, model.counts.optimizer):
            optimizer.step()
        model.events += ids.numel()
        model.batches += 1
