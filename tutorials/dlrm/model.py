"""DLRM (Naumov et al. 2019, https://arxiv.org/abs/1906.00091) with dynamic embedding tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.storage.tiers import StorageStats
from tutorials.dlrm.data import (
    CATEGORY_COUNT,
    FEATURE_NAMES,
    INTEGER_COUNT,
    MISSING_INTEGER,
    Int64Array,
)

DENSE_COUNT = 2 * INTEGER_COUNT
"""Inputs of the bottom MLP: the logarithm of each integer, and whether it is missing."""
ROW_BOUND = 0.01
"""Rows start uniform in ``[-ROW_BOUND, ROW_BOUND]``."""


class Figures(NamedTuple):
    """Numbers of all dynamic tables together, for the report."""

    ids: int
    table_bytes: int  # of memory: rows, optimizer state, index, scores, counts
    evicted: int  # ids that made room for others
    rejected: int  # new ids without room, counted once per step
    not_admitted: int  # new ids that the admission rule refused, counted once per step
    ids_by_feature: tuple[int, ...]
    evicted_by_feature: tuple[int, ...]
    storage: StorageStats | None = None  # None: all rows are in memory


class DynamicRows(nn.Module):
    """One table per feature, all in one group; empty until training brings ids.

    Args:
        embedding_dim: Length of a row.
        optimizer: Updates the rows in the backward.
        policies: Which ids get a row, and how long they keep it, by feature; None: all, for ever.
        dtype: Of the rows.
        split: Update the rows in the optimizer's ``step()`` instead, for micro-batches.
        storage: Files with the rows that are not in memory; None: all are in memory.
    """

    def __init__(
        self,
        embedding_dim: int,
        optimizer: td.optim.OptimizerConfig,
        *,
        policies: Sequence[td.Policy] | None = None,
        dtype: torch.dtype = torch.float32,
        split: bool = False,
        storage: td.SSDStore | None = None,
    ) -> None:
        super().__init__()
        self.embedding_dim = embedding_dim
        self.tables = td.DynamicEmbeddingBagCollection(
            [
                td.TableConfig(
                    name,
                    embedding_dim,
                    [name],
                    initializer=td.Uniform(-ROW_BOUND, ROW_BOUND),
                    policy=policy,
                    dtype=dtype,
                    storage=storage,
                )
                for name, policy in zip(
                    FEATURE_NAMES, policies or [td.Policy()] * CATEGORY_COUNT, strict=True
                )
            ],
            optimizer=optimizer,
            mode="sum",
            split=split,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids (26, B) int64 as embeddings (B, 26, D) float32."""
        embeddings: Tensor = self.tables(_features(ids))
        return embeddings.view(-1, CATEGORY_COUNT, self.embedding_dim)

    def prefetch(self, ids: Tensor) -> None:
        """Begin to read the rows of the next step's ids (26, B) int64 from their files."""
        self.tables.prefetch(_features(ids))

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer; ``step()`` ends a training step."""
        return self.tables.optimizer

    def figures(self) -> Figures:
        """Return the numbers to report."""
        stats = self.tables.group.usage.tables().values()
        return Figures(
            ids=sum(table.size for table in stats),
            table_bytes=self.tables.memory()["total"],
            evicted=sum(table.evicted for table in stats),
            rejected=sum(table.rejected for table in stats),
            not_admitted=sum(table.not_admitted for table in stats),
            ids_by_feature=tuple(table.size for table in stats),
            evicted_by_feature=tuple(table.evicted for table in stats),
            storage=self.tables.group.usage.storage(),
        )


class DLRM(nn.Module):
    """Bottom MLP, embeddings, pairwise dot products, top MLP.

    Args:
        rows: Module from ids (26, B) int64 to embeddings (B, 26, embedding_dim).
        embedding_dim: Length of an embedding, and of the bottom MLP's output.
    """

    pairs: Tensor

    def __init__(self, rows: nn.Module, embedding_dim: int) -> None:
        super().__init__()
        self.rows = rows
        self.bottom = _mlp(DENSE_COUNT, 64, embedding_dim)
        vectors = CATEGORY_COUNT + 1
        first, second = np.tril_indices(vectors, k=-1)
        self.register_buffer("pairs", torch.from_numpy(first * vectors + second), persistent=False)
        self.top = _mlp(embedding_dim + len(first), 64, 32, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Compute the log-odds of a click (B,) from dense features (B, 26) and ids (26, B)."""
        x = self.bottom(dense)
        vectors = torch.cat([x.unsqueeze(1), self.rows(ids)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        z = torch.cat([x, products.index_select(1, self.pairs)], dim=1)
        logits: Tensor = self.top(z)
        return logits.squeeze(1)

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the two MLPs."""
        return [*self.bottom.parameters(), *self.top.parameters()]


def dense_features(integers: Int64Array) -> Tensor:
    """Turn integers (B, 13) into inputs of the bottom MLP.

    Returns:
        (B, 26) float32: ``sign(x) * log(1 + |x|)``, or 0 where missing, then 1 where missing.
    """
    missing = integers == MISSING_INTEGER
    values = np.where(missing, 0, integers).astype(np.float32)
    values = np.sign(values) * np.log1p(np.abs(values))
    return torch.from_numpy(np.concatenate([values, missing.astype(np.float32)], axis=1))


def _features(ids: Tensor) -> td.KeyedJagged:
    """Make a bag per feature and sample, each of one id."""
    offsets = torch.arange(ids.numel() + 1, device=ids.device)
    return td.KeyedJagged(FEATURE_NAMES, ids.reshape(-1), offsets)


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
