"""Which ids the tables of a rank have."""

from __future__ import annotations

import torch
from jagged_batches import Batch, keyed_jagged
from sharded_models import Table, kernels, sharded
from unsharded_oracle import rows_by_id

from torch_dynemb.torchrec import TableOptions


def ids_after_training(rank: int, sharding: str, ids: list[int]) -> dict[int, list[int]]:
    """By first column of a shard, its ids after a step in which every rank looks up all of them."""
    model = sharded([Table("users", 8, ("user",), sharding=sharding)])
    batch = Batch({"user": [torch.tensor([id]) for id in ids]})
    model(keyed_jagged(batch, "plain"))["user"].sum().backward()
    return {
        shard.first_column: list(rows_by_id(kernel.tables.group, t))
        for kernel in kernels(model)
        for t, shard in enumerate(kernel.tables.shards)
    }


def initial_rows(rank: int, sharding: str) -> list[float]:
    """Elements of new rows of a table of 16 rows with the default initializer."""
    table = Table("users", 8, ("user",), sharding=sharding, num_embeddings=16)
    model = sharded([table], options={"users": TableOptions()})
    batch = Batch({"user": [torch.arange(100)]})
    model(keyed_jagged(batch, "plain"))
    return [
        x
        for kernel in kernels(model)
        for row in rows_by_id(kernel.tables.group, 0).values()
        for x in row.tolist()
    ]
