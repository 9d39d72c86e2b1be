"""DLRM (Naumov et al. 2019, https://arxiv.org/abs/1906.00091).

Where the embeddings come from is a module of its own; see :mod:`tutorials.dlrm.rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from tutorials.dlrm.parsing import CATEGORY_COUNT, INTEGER_COUNT, MISSING_INTEGER, Int64Array

DENSE_COUNT = 2 * INTEGER_COUNT
"""Inputs of the bottom MLP: each integer's logarithm, and whether it is missing."""


def dense_features(integers: Int64Array) -> Tensor:
    """Turn integers into inputs of the bottom MLP.

    Args:
        integers: (B, 13) int64, MISSING_INTEGER where missing.

    Returns:
        (B, 26) float32: ``sign(x) * log(1 + |x|)``, or 0 where missing, then 1 where missing.
    """
    missing = integers == MISSING_INTEGER
    values = np.where(missing, 0, integers).astype(np.float32)
    values = np.sign(values) * np.log1p(np.abs(values))
    return torch.from_numpy(np.concatenate([values, missing.astype(np.float32)], axis=1))


class DLRM(nn.Module):
    """Bottom MLP, embeddings, pairwise dot products, top MLP.

    Args:
        rows: Module from ids (26, B) int64 to embeddings (B, 26, embedding_dim).
        embedding_dim: Length of an embedding, and of the bottom MLP's output.
        bottom: Widths of the bottom MLP's hidden layers.
        top: Widths of the top MLP's hidden layers.
    """

    pairs: Tensor

    def __init__(
        self,
        rows: nn.Module,
        embedding_dim: int,
        *,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 32),
    ) -> None:
        super().__init__()
        self.rows = rows
        self.bottom = _mlp([DENSE_COUNT, *bottom, embedding_dim])
        vectors = CATEGORY_COUNT + 1
        first, second = np.tril_indices(vectors, k=-1)
        self.register_buffer("pairs", torch.from_numpy(first * vectors + second), persistent=False)
        self.top = _mlp([embedding_dim + len(first), *top, 1])

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Compute the log-odds of a click.

        Args:
            dense: (B, 26) float32, from :func:`dense_features`.
            ids: (26, B) int64.

        Returns:
            (B,) float32.
        """
        x = self.bottom(dense)
        vectors = torch.cat([x.unsqueeze(1), self.rows(ids)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        z = torch.cat([x, products.index_select(1, self.pairs)], dim=1)
        logits: Tensor = self.top(z)
        return logits.squeeze(1)

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the two MLPs."""
        return [*self.bottom.parameters(), *self.top.parameters()]


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
