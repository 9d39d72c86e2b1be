"""Small embeddings with OneEmbedding's names, and what is in them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import oneembedding

UNIFORM = oneembedding.make_uniform_initializer(-0.5, 0.5)


def store(path: Any = None, capacity: int = 1000, **options: Any) -> oneembedding.StoreOptions:
    """Rows in memory; snapshots nowhere, unless a path says where."""
    folder = f"{tempfile.gettempdir()}/none" if path is None else path
    return oneembedding.make_device_mem_store_options(folder, capacity, **options)


def tables(count: int) -> list[oneembedding.TableOptions]:
    return [oneembedding.make_table_options(UNIFORM) for _ in range(count)]


def embedding(
    count: int = 3,
    dims: int | Sequence[int] = 4,
    *,
    path: Any = None,
    size_factor: int = 3,
    **options: Any,
) -> oneembedding.MultiTableMultiColumnEmbedding:
    """An embedding of so many tables."""
    arguments = {
        "name": "small",
        "embedding_dim": dims,
        "dtype": torch.float32,
        "key_type": torch.int64,
        "tables": tables(count),
        "store_options": store(path, size_factor=size_factor),
    }
    return oneembedding.MultiTableMultiColumnEmbedding(**{**arguments, **options})


def content(of: Any) -> dict[tuple[int, int], Tensor]:
    """The rows of the ids that an embedding has on this rank, by table and id."""
    found = {}
    for table in range(of.num_tables):
        for ids, rows, *_ in of.group.export(table):
            for id, row in zip(ids.tolist(), rows.cpu(), strict=True):
                found[table, id] = row.clone()
    return found
