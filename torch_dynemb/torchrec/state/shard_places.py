"""Where the shards of a dynamic table lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torchrec.distributed.types import ParameterSharding

from torch_dynemb.torchrec.sharding.shardings import BY_ROWS


class Place(NamedTuple):
    """One shard of a table.

    Attributes:
        column_shard: its number among the column shards.
        first_column: of the rows of the whole table.
        columns: how many.
        part: which of the ids it has, of as many parts as there are places with its columns.
        rank: that has it.
    """

    column_shard: int
    first_column: int
    columns: int
    part: int
    rank: int


def places_of(sharding: ParameterSharding) -> list[Place]:
    """All shards of a table, by columns, then by part."""
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
    """The placement of a rank's shard in a ShardedTensor: ranks of a machine count its devices.

    Args:
        rank: of all ranks.
        device: of the shards; its index is that of this rank.
    """
    index = "" if device.type == "cpu" else f":{rank % torch.accelerator.device_count()}"
    return f"rank:{rank}/{device.type}{index}"


__all__ = ["Place", "placement_of", "places_of"]
