"""Shards and sizes of the dynamic tables of a sharded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from torch_dynemb.distributed.ranks import from_all_ranks
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.shards import TableShard
from torch_dynemb.torchrec.planning.sharding_groups import sharding_group
from torch_dynemb.torchrec.sharding.kernels import DynamicKernel


class LocalShard(NamedTuple):
    """Shard of a dynamic table on this rank.

    Attributes:
        table: name of the table, with the path of its collection in the model.
        shard: its ids and columns; it has the table's name in the collection.
        group: the table group with the shard, for scores, export and statistics.
        number: number of the shard's table in the group.
    """

    table: str
    shard: TableShard
    group: TableGroup
    number: int


def local_shards(model: nn.Module) -> Iterator[LocalShard]:
    """Yield the shards of dynamic tables on this rank, of all sharded collections of a model.

    Args:
        model: sharded, such as a DistributedModelParallel.

    Raises:
        ValueError: the model has no sharded collection with dynamic tables.
    """
    whole = model.module if isinstance(model, DistributedModelParallel) else model
    sharded = False
    for path, module in whole.named_modules():
        kernels: Any = getattr(module, "kernels", None)
        if not callable(kernels):
            continue
        sharded = True
        for kernel in kernels():
            if not isinstance(kernel, DynamicKernel):
                continue
            for number, shard in enumerate(kernel.tables.shards):
                name = f"{path}.{shard.name}" if path else shard.name
                yield LocalShard(name, shard, kernel.tables.group, number)
    if not sharded:
        raise ValueError(
            f"local_shards: model, a {type(model).__name__}, has no sharded collection with "
            "dynamic tables: give what DistributedModelParallel returns, with sharders of "
            "torch_dynemb.torchrec"
        )


def table_sizes(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """Return the ids of every dynamic table, summed over ranks; all ranks call it.

    Args:
        model: sharded.
        process_group: of the ranks that share the model; default: those of a
            DistributedModelParallel, in 2D parallelism of its sharding group, else all ranks.

    Raises:
        ValueError: the model has no sharded collection with dynamic tables.
    """
    if process_group is None and isinstance(model, DistributedModelParallel):
        process_group = sharding_group(model._env)
    here: dict[str, int] = {}
    for local in local_shards(model):
        if local.shard.first_column == 0:
            size = local.group.size(local.number)
            here[local.table] = here.get(local.table, 0) + size
    gathered = from_all_ranks(here, process_group)
    names = sorted({name for of_rank in gathered for name in of_rank})
    return {name: sum(of_rank.get(name, 0) for of_rank in gathered) for name in names}


__all__ = ["LocalShard", "local_shards", "table_sizes"]
