"""What the dynamic tables of a sharded model hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from torch_dynemb.distributed.ranks import from_all_ranks
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.shards import TableShard
from torch_dynemb.torchrec.sharding.kernels import DynamicKernel


class LocalShard(NamedTuple):
    """A shard of a dynamic table on this rank.

    Attributes:
        table: its name, with the path of its collection in the model.
        shard: which ids and columns it has, of the table by its name in the collection.
        group: the table group that it is in: scores, export, statistics.
        number: of its table in the group.
    """

    table: str
    shard: TableShard
    group: TableGroup
    number: int


def local_shards(model: nn.Module) -> Iterator[LocalShard]:
    """The shards of dynamic tables on this rank, of all sharded collections of a model.

    Args:
        model: sharded, such as a DistributedModelParallel.

    Raises:
        ValueError: the model has no sharded collection of a sharder for dynamic tables.
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
    """Ids of every dynamic table on all ranks together; all ranks call it.

    Args:
        model: sharded.
        process_group: over which it is sharded; default: all ranks.

    Raises:
        ValueError: the model has no sharded collection of a sharder for dynamic tables.
    """
    here: dict[str, int] = {}
    for local in local_shards(model):
        if local.shard.first_column == 0:
            size = local.group.size(local.number)
            here[local.table] = here.get(local.table, 0) + size
    gathered = from_all_ranks(here, process_group)
    names = sorted({name for of_rank in gathered for name in of_rank})
    return {name: sum(of_rank.get(name, 0) for of_rank in gathered) for name in names}


__all__ = ["LocalShard", "local_shards", "table_sizes"]
