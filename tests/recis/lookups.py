"""What tests of the RecIS modules compare with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.recis import DynamicEmbedding, EmbeddingOption, HashTable, RaggedTensor


def option(name: str = "item", **changes: object) -> EmbeddingOption:
    """An option with rows that differ, on the device of the tests."""
    arguments = {
        "embedding_dim": 4,
        "initializer": td.Normal(),
        "block_size": 8,
        "device": torch.get_default_device(),
        **changes,
    }
    return EmbeddingOption(shared_name=name, **arguments)  # type: ignore[arg-type]


def embedding(name: str = "item", **changes: object) -> DynamicEmbedding:
    """An embedding of such an option."""
    return DynamicEmbedding(option(name, **changes))


def hash_table(embedding_shape: list[int], **arguments: Any) -> HashTable:
    """A table on the device of the tests."""
    return HashTable(embedding_shape, device=torch.get_default_device(), **arguments)


def rows_of(table: HashTable, ids: Sequence[int] | Tensor, child: str | None = None) -> Tensor:
    """Rows of ids that are in a table: [n, dim]."""
    known = dict(zip(table.ids(child).tolist(), table.embeddings(child), strict=True))
    flat = torch.as_tensor(ids).flatten().tolist()
    return torch.stack([known[i] for i in flat]) if flat else torch.zeros(0, table.embedding_dim)


def combined(
    rows: Sequence[Tensor], weights: Sequence[Tensor] | None, combiner: str, tile_len: int = 0
) -> Tensor:
    """Bags of rows, [n, dim] each, as one tensor: the definition of the combiners."""
    results = []
    for b, bag in enumerate(rows):
        weight = torch.ones(bag.shape[0]) if weights is None else weights[b]
        weighted = bag * weight[:, None]
        if combiner == "tile":
            tile = torch.zeros(tile_len, bag.shape[1])
            tile[: min(tile_len, len(bag))] = weighted[:tile_len]
            results.append(tile.flatten())
        elif combiner == "mean" and len(bag) > 0:
            results.append(weighted.sum(0) / weight.sum())
        else:
            results.append(weighted.sum(0))
    return torch.stack(results)


def bags(ragged: RaggedTensor, per_value: Tensor) -> list[Tensor]:
    """What belongs to each innermost row."""
    bounds = ragged.offsets()[-1].tolist()
    return [per_value[a:b] for a, b in itertools.pairwise(bounds)]
