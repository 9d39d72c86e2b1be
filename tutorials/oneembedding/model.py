"""DLRM over one embedding with a table for each of the 26 features."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from torch_dynemb import oneembedding
from tutorials.dlrm.data import CATEGORY_COUNT, MISSING_ID
from tutorials.dlrm.model import DLRM

# By optimizer: with Adam's two moments, or Ftrl's two sums, a row is three times as wide.
SIZE_FACTORS = {"sgd": 1, "momentum": 2, "adagrad": 2, "adam": 3, "ftrl": 3}


def store_options(
    store: str, path: Path, *, capacity: int, cache_mb: int, size_factor: int
) -> oneembedding.StoreOptions:
    """Say where the rows lie.

    Args:
        store: ``"device_mem"``, ``"cached_host_mem"`` or ``"cached_ssd"``.
        path: Where snapshots go, and rows that lie on SSD.
        capacity: Ids that a table may have over all ranks.
        cache_mb: MiB of memory for rows that are in use, where there is a slower one behind it.
        size_factor: What a row takes with its optimizer state, in multiples of its columns.
    """
    if store == "device_mem":
        return oneembedding.make_device_mem_store_options(
            persistent_path=str(path), capacity=capacity, size_factor=size_factor
        )
    make = (
        oneembedding.make_cached_ssd_store_options
        if store == "cached_ssd"
        else oneembedding.make_cached_host_mem_store_options
    )
    return make(
        cache_budget_mb=cache_mb,
        persistent_path=str(path),
        capacity=capacity,
        size_factor=size_factor,
    )


class Rows(nn.Module):
    """Rows of the 26 features: ids (26, B) to (B, 26, embedding_dim).

    Args:
        embedding_dim: Columns of a row.
        options: Where rows lie.
    """

    def __init__(self, embedding_dim: int, options: oneembedding.StoreOptions) -> None:
        super().__init__()
        tables = [
            oneembedding.make_table_options(
                oneembedding.make_uniform_initializer(low=-0.01, high=0.01)
            )
            for _ in range(CATEGORY_COUNT)
        ]
        self.embedding = oneembedding.MultiTableEmbedding(
            name="categories",
            embedding_dim=embedding_dim,
            dtype=torch.float,
            key_type=torch.int64,
            tables=tables,
            store_options=options,
            padding_idx=MISSING_ID,  # a missing category is a row of zeros
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Look up one id of every table for each sample.

        Args:
            ids: (26, B) int64.

        Returns:
            (B, 26, embedding_dim) float32.
        """
        rows: Tensor = self.embedding(ids.t())
        return rows


def make_model(embedding_dim: int, options: oneembedding.StoreOptions) -> DLRM:
    """Make the network of ``make train`` with these rows."""
    return DLRM(Rows(embedding_dim, options), embedding_dim)


def make_optimizer(
    name: str, model: DLRM, embedding: oneembedding.MultiTableEmbedding, *, lr: float
) -> oneembedding.Optimizer:
    """Make an optimizer of torch for all parameters, and have the rows follow it.

    Args:
        name: One of ``SIZE_FACTORS``.
        model: All of it.
        embedding: In the model.
        lr: Learning rate.
    """
    parameters = model.parameters()  # the embedding's among them
    optimizer: torch.optim.Optimizer
    if name in ("sgd", "momentum"):
        momentum = 0.9 if name == "momentum" else 0.0
        optimizer = torch.optim.SGD(parameters, lr=lr, momentum=momentum)
    elif name == "adagrad":
        optimizer = torch.optim.Adagrad(parameters, lr=lr)
    elif name == "adam":
        optimizer = torch.optim.Adam(parameters, lr=lr)
    else:
        optimizer = oneembedding.Ftrl(parameters, lr=lr, beta=1.0)
    return oneembedding.Optimizer(optimizer, embeddings=[embedding])
