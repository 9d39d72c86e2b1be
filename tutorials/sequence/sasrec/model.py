"""SASRec: what a user rates next, by attention over what came before.

Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM 2018. The same table gives the rows
of the history and is what the result is searched in.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

import torch_dynemb as td
from tutorials.sequence.sasrec.data import PADDING, PLACES


class Block(nn.Module):
    """Attention to earlier places, then a layer for each place.

    Args:
        dim: columns of a place.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.before_attention, self.before_layer = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.inputs, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.layer = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, places: Tensor) -> Tensor:
        """Return float [B, L, dim], as ``places`` is."""
        query, key, value = self.inputs(self.before_attention(places)).chunk(3, dim=2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        places = places + self.output(attended)
        result: Tensor = places + self.layer(self.before_layer(places))
        return result


class SASRec(nn.Module):
    """Vectors that are close to those of the next item.

    Padding comes after a history. So no place attends to it, and it needs no mask.

    Args:
        items: gives rows [B, L, dim] of ids [B, L]; padding ids have zeros.
        dim: columns of a row.
        steps: the longest history.
        blocks: of attention.
    """

    def __init__(self, items: nn.Module, dim: int, steps: int, blocks: int = 2) -> None:
        super().__init__()
        self.items = items
        self.places = nn.Embedding(steps, dim)
        nn.init.normal_(self.places.weight, std=0.1)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(blocks)))
        self.last = nn.LayerNorm(dim)

    def forward(self, history: Tensor) -> Tensor:
        """Return a query for the item after each place.

        Args:
            history: int64 [B, L], the earliest first.

        Returns:
            float [B, L, dim].
        """
        rows = self.items(history) + self.places.weight[: history.shape[1]]
        queries: Tensor = self.last(self.blocks(rows))
        return queries

    def after(self, history: Tensor) -> Tensor:
        """Return a query for the item after each history, float [B, dim]."""
        count = (history != PADDING).sum(1)
        last = (count - 1).clamp(min=0)[:, None, None]
        queries = self(history)
        return queries.gather(1, last.expand(-1, 1, queries.shape[2])).squeeze(1)


class Retriever(nn.Module):
    """The model as it is served: histories in, ids and scores out.

    Args:
        model: with dynamic items.
    """

    def __init__(self, model: SASRec) -> None:
        super().__init__()
        self.model = model

    def forward(self, history: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest items that are not in the history.

        Args:
            history: int64 [B, L].

        Returns:
            ids, int64 [B, PLACES], and scores, float32 [B, PLACES].
        """
        query = self.model.after(history)
        found = td.top_k(query, self.model.items, PLACES, exclude=history)
        return found.ids, found.scores
