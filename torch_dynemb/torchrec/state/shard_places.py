"""Ranks, ids and columns of the shards of a dynamic table."""

from __future__ import annotations

import torch
from torchrec.distributed.types import ParameterSharding

from torch_dynemb.rows.exchange import Place
from torch_dynemb.torchrec.sharding.shardings import BY_ROWS


def places_of(sharding: ParameterSharding) -> list[Place]:
    """Return all shards of a table, by columns, then by part."""
    by_column: dict[int, list[tuple[int, int]]] = {}
    for shard in sharding.sharding_spec.shards:
        _, first = shard.shard_offsets
        rank = shard.placement.rank()
        by_column.setdefault(first, []).append((shard.shard_sizes[1], rank))
    places = []
    for number, first in enumerate(sorted(by_column)):
        parts = by_column[first]
        if sharding.sharding_type not in BY_ROWS:
            parts = parts[:1]
        places += [
            Place(number, first, columns, part, rank) for part, (columns, rank) in enumerate(parts)
        ]
    return places


def placement_of(rank: int, device: torch.device) -> str:
    """Return a shard's placement in a ShardedTensor; ranks of a machine number its devices.

    Args:
        rank: of all ranks.
        device: of the shards; its index is that of this rank.
    """
    index = "" if device.type == "cpu" else f":{rank % torch.accelerator.device_count()}"
    return f"rank:{rank}/{device.type}{index}"


__all__ = ["placement_of", "places_of"]
