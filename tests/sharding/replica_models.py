"""Models on two sharding groups of two ranks, and comparisons of the groups."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from replica_oracle import Shard, shard_of
from sharded_models import Model, Table, kernels, module_plan
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingPlan

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicDMPCollection,
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    TableOptions,
)

GROUP = 2  # ranks of a sharding group
DEFAULT = TableOptions(initializer=td.Normal())


SHARDED = (
    Table("rows", 8, ("a",)),
    Table("whole", 8, ("b",), sharding="table_wise"),
    Table("columns", 8, ("c",), sharding="column_wise"),
)
COUNTED = {
    "rows": TableOptions(
        initializer=td.Normal(),
        policy=td.Policy(score="frequency", admission=td.AdmitFrequent(2)),
    ),
}
ROWS = (Table("rows", 8, ("a",)),)


def plan_of(model: Model, tables: Sequence[Table], sharders: Sequence[Any]) -> ShardingPlan:
    """A plan for one sharding group."""
    plan = {}
    for name, sharder in zip(("bags", "sequences"), sharders, strict=True):
        of = [table for table in tables if (table.pooling == "none") == (name == "sequences")]
        if of:
            plan[name] = module_plan(getattr(model, name), of, sharder, ranks=GROUP)
    return ShardingPlan(plan)


def replicated(
    tables: Sequence[Table],
    *,
    options: dict[str, TableOptions] | None = None,
    optimizer: Any = None,
    weighted: bool = False,
    prepare: Callable[[Model], None] | None = None,
    fused_params: dict[str, Any] | None = None,
    **more: Any,
) -> DynamicDMPCollection:
    """A model on two sharding groups."""
    model = Model(tables, weighted)
    if prepare is not None:
        prepare(model)
    given = {of.name: (options or {}).get(of.name, DEFAULT) for of in tables if of.dynamic}
    sharders: list[Any] = [
        kind(options=given, optimizer=optimizer, fused_params=fused_params)
        for kind in (DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder)
    ]
    arguments: dict[str, Any] = {
        "device": torch.device("cpu"),
        "plan": plan_of(model, tables, sharders),
        "world_size": dist.get_world_size(),
        "sharding_group_size": GROUP,
        "global_pg": dist.group.WORLD,
        "sharders": sharders,
        **more,
    }
    return DynamicDMPCollection(model, **arguments)


def batch_of(tables: Sequence[Table], ids: int, seed: int) -> KeyedJaggedTensor:
    """Some bags of each feature."""
    draw = random.Random(seed)
    features = list(dict.fromkeys(name for table in tables for name in table.features))
    lengths = [draw.randrange(4) for _ in features for _ in range(3)]
    values = [draw.randrange(ids) for _ in range(sum(lengths))]
    return KeyedJaggedTensor(
        features,
        torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
    )


def train(model: nn.Module, tables: Sequence[Table], ids: int, seed: int) -> None:
    """A training step; the ranks of a sharding group make it together."""
    outputs = model(batch_of(tables, ids, seed))
    sum((of.square() + of).sum() for of in outputs.values()).backward()
    model.fused_optimizer.step()  # type: ignore[operator, union-attr]


def shards(model: nn.Module) -> Iterator[tuple[Any, int]]:
    """All dynamic tables on this rank: their group and number."""
    for kernel in kernels(model):
        group = kernel.tables.group
        yield from ((group, table) for table in range(len(group.names)))


def replicas_of(model: DynamicDMPCollection, value: Any) -> list[Any]:
    """A value of each sharding group."""
    gathered: list[Any] = [None] * model.replica_group.size()
    dist.all_gather_object(gathered, value, group=model.replica_group)
    return gathered


def check_equal(model: DynamicDMPCollection) -> list[Shard]:
    """Raises AssertionError unless all sharding groups have the same bits; returns the shards."""
    mine = [shard_of(*of) for of in shards(model)]
    for others in replicas_of(model, mine):
        for own, other in zip(mine, others, strict=True):
            assert_same(own, other, "a replica")
    return mine


def assert_same(own: Shard, other: Shard, what: str) -> None:
    """Raises AssertionError unless two shards have the same bits."""
    assert own.entries.keys() == other.entries.keys(), (
        what,
        sorted(own.entries.keys() ^ other.entries.keys()),
    )
    for id, entry in own.entries.items():
        assert entry.same(other.entries[id]), (what, id, entry, other.entries[id])
    assert own.counts == other.counts, (what, own.counts, other.counts)
    assert own.clock == other.clock, (what, own.clock, other.clock)


def of_all(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
