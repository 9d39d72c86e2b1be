"""Plans of TorchRec for tables in the places that the model of ranks gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrec.distributed.sharding_plan import (
    _get_parameter_sharding,
    _get_parameter_size_offsets,
    column_wise,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingType

from torch_dynemb.plan.ranks.layouts import Cluster, PlacedColumns, Sharding
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL


def generators_of(
    sharding: Sharding, pieces: Sequence[PlacedColumns], cluster: Cluster, names: Sequence[str]
) -> Mapping[str, Any]:
    """Return how construct_module_sharding_plan shards each table.

    Args:
        sharding: type of all tables.
        pieces: of the tables.
        cluster: the ranks.
        names: of the tables.
    """
    return {
        name: _typed(sharding, [piece for piece in pieces if piece.table == table], cluster)
        for table, name in enumerate(names)
    }


def _typed(sharding: Sharding, pieces: Sequence[PlacedColumns], cluster: Cluster) -> Any:
    ranks = [piece.ranks.start for piece in pieces]
    generate = {
        "table_wise": lambda: table_wise(rank=ranks[0]),
        "column_wise": lambda: column_wise(ranks=ranks),
        "table_column_wise": lambda: column_wise(ranks=ranks),
        "row_wise": row_wise,
        "table_row_wise": lambda: table_row_wise(host_index=ranks[0] // cluster.local),
        "grid_shard": lambda: _grid(pieces),
    }[sharding]()

    def generated(*arguments: Any) -> Any:
        planned = generate(*arguments)
        planned.sharding_type = sharding
        planned.compute_kernel = DYNAMIC_KERNEL
        return planned

    return generated


def _grid(pieces: Sequence[PlacedColumns]) -> Any:
    def generate(param: Any, local: int, world: int, device: str, sharder: Any) -> Any:
        offsets = _get_parameter_size_offsets(
            param, ShardingType.GRID_SHARD, local, world, col_wise_shard_dim=pieces[0].width
        )
        ranks = [rank for piece in pieces for rank in piece.ranks]
        shards = [(size, offset, rank) for rank, (size, offset) in zip(ranks, offsets, strict=True)]
        return _get_parameter_sharding(param, "grid_shard", shards, local, device, sharder)

    return generate
