"""The chance that a user clicks on an ad, from two tables without a vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torch_dynemb as td
from tutorials.online.events import AD, CLICK, USER

DIM = 8


class Clicks(nn.Module):
    """Products of rows of users and ads. Ads that are no longer shown lose their rows.

    ``seen`` counts the events that it was trained on, so that an answer says which it knows.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        begin = td.Uniform(-0.3, 0.3)
        self.users = td.DynamicEmbedding(
            DIM, name="users", initializer=begin, optimizer=td.Adagrad(lr=0.2)
        )
        # steps of constant size, not smaller ones with time: what an ad means to users changes
        self.ads = td.DynamicEmbedding(
            DIM,
            name="ads",
            initializer=begin,
            optimizer=td.SGD(lr=0.1),
            policy=td.Policy(capacity=1000, score="step"),
        )
        self.bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, users: Tensor, ads: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, float32 [B], and the number of events that the model was trained on."""
        return (self.users(users) * self.ads(ads)).sum(1) + self.bias, self.seen


class Training:
    """A model with its optimizers.

    Attributes:
        model: the model.
        dense_optimizer: of the bias.
    """

    def __init__(self) -> None:
        self.model = Clicks()
        self.dense_optimizer = torch.optim.SGD([self.model.bias], lr=2e-4)

    def step(self, events: Tensor) -> None:
        """Train on some events, int64 [n, COLUMNS]."""
        model = self.model
        logits, _ = model(events[:, USER].contiguous(), events[:, AD].contiguous())
        labels = events[:, CLICK].float()
        # a sum: an ad that was shown twice as often takes twice the step
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        self.dense_optimizer.zero_grad()
        loss.backward()
        self.dense_optimizer.step()
        model.users.optimizer.step()
        model.ads.optimizer.step()
        model.seen += len(events)
