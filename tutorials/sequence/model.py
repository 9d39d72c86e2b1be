"""Target attention: a candidate looks at the user's history."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.recis import EmbeddingEngine, EmbeddingOption, RaggedTensor
from tutorials.sequence.data import LONGEST


class SequenceModel(nn.Module):
    """Embeddings in one engine, a dense network behind them.

    The history is two features. ``clicked`` keeps the rows of all clicks apart, side by side, for
    the attention; ``recent`` is their mean weighted by recency. Both share the table of the
    candidate: what the model learns about an item that is shown, it knows when it is clicked.

    Args:
        dim: Columns of a row.
        history: False: without the two features of the history.
    """

    def __init__(self, dim: int, *, history: bool) -> None:
        super().__init__()
        initial = td.Uniform(-0.1, 0.1)
        options = {
            "user": EmbeddingOption(embedding_dim=dim, shared_name="user", initializer=initial),
            "candidate": EmbeddingOption(
                embedding_dim=dim, shared_name="item", initializer=initial
            ),
        }
        if history:
            options["clicked"] = EmbeddingOption(
                embedding_dim=dim,
                shared_name="item",
                initializer=initial,
                combiner="tile",
                combiner_kwargs={"tile_len": LONGEST},
            )
            options["recent"] = EmbeddingOption(
                embedding_dim=dim, shared_name="item", initializer=initial, combiner="mean"
            )
        self.history = history
        self.engine = EmbeddingEngine(options)
        self.network: nn.Module = AttentionNetwork(dim) if history else PairNetwork(dim)

    def forward(
        self, users: Tensor, candidates: Tensor, history: Tensor, offsets: Tensor, recency: Tensor
    ) -> Tensor:
        """Return log-odds of a click, float32 [B]; arguments are those of a batch."""
        features: dict[str, Tensor | RaggedTensor] = {
            "user": users[:, None],
            "candidate": candidates[:, None],
        }
        if self.history:
            features["clicked"] = RaggedTensor(history, offsets)
            features["recent"] = RaggedTensor(history, offsets, recency)
        rows = self.engine(features)
        inputs = [rows["user"], rows["candidate"]]
        if self.history:
            inputs += [rows["clicked"], rows["recent"], offsets.diff()]
        logits: Tensor = self.network(*inputs)
        return logits

    def ids(self) -> dict[str, int]:
        """Return ids that have rows on this rank, by table."""
        return {
            child: table.ids(child).shape[0]
            for table in self.engine.tables.values()
            for child in table.children_hashtable
        }


class AttentionNetwork(nn.Module):
    """Network that weighs every click by the candidate, as DIN's activation unit does.

    Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018; with a softmax
    over the clicks.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = _mlp(3 * dim, 16)
        self.top = _mlp(6 * dim, 64, 32)

    def forward(
        self, user: Tensor, candidate: Tensor, clicked: Tensor, recent: Tensor, lengths: Tensor
    ) -> Tensor:
        """Return log-odds [B] of rows [B, dim], ``clicked`` [B, LONGEST * dim] and lengths [B]."""
        clicks = clicked.unflatten(1, (LONGEST, -1))
        query = candidate[:, None].expand_as(clicks)
        scores = self.attention(torch.cat([clicks, query, clicks * query], dim=2)).squeeze(2)
        scores = scores + (clicks * query).sum(2)
        absent = torch.arange(LONGEST, device=lengths.device) >= lengths[:, None]
        scores = scores.masked_fill(absent, torch.finfo(scores.dtype).min)
        interest = (scores.softmax(1)[:, None] @ clicks).squeeze(1)
        both = [user, candidate, interest, recent, interest * candidate, recent * candidate]
        logits: Tensor = self.top(torch.cat(both, dim=1)).squeeze(1)
        return logits


class PairNetwork(nn.Module):
    """The same without a history: the baseline."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.top = _mlp(3 * dim, 64, 32)

    def forward(self, user: Tensor, candidate: Tensor) -> Tensor:
        """Return log-odds [B] from rows [B, dim]."""
        logits: Tensor = self.top(torch.cat([user, candidate, user * candidate], dim=1)).squeeze(1)
        return logits


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))
