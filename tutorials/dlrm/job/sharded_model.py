"""DLRM with rows on many ranks: an EmbeddingBagCollection of dynamic tables, sharded.

The mathematics is that of one process with :class:`tutorials.dlrm.model.DynamicRows`: a row begins
with values that depend on seed, table name, id and column, and on no rank.
"""

from __future__ import annotations

import os
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.types import DataType

import torch_dynemb as td
from torch_dynemb.storage.tiers import StorageStats
from torch_dynemb.table.group import TableGroup
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingShardingPlanner,
    DynamicTableConstraints,
    TableOptions,
    local_shards,
)
from tutorials.dlrm.data import CATEGORY_COUNT, FEATURE_NAMES
from tutorials.dlrm.job.optimizers import row_optimizer
from tutorials.dlrm.job.storage import storage_of
from tutorials.dlrm.model import DLRM, ROW_BOUND, Figures

_PLANNED_IDS = 100_000
"""Ids that the planner takes a table of unbounded size to have."""

_LEAST_COLUMNS = 4
"""A shard of columns begins at a multiple of so many."""

_DATA_TYPES = {
    "float32": DataType.FP32,
    "bfloat16": DataType.BF16,
    "float16": DataType.FP16,
}


class CollectionRows(nn.Module):
    """One table per feature in an EmbeddingBagCollection, without memory until it is sharded.

    Args:
        opts: Of the job.
        policies: By feature.
    """

    def __init__(self, opts: Namespace, policies: Sequence[td.Policy]) -> None:
        super().__init__()
        self.embedding_dim = opts.embedding_dim
        self.collection = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    num_embeddings=policy.capacity or _PLANNED_IDS,  # bounds nothing
                    embedding_dim=opts.embedding_dim,
                    name=name,
                    feature_names=[name],
                    data_type=_DATA_TYPES[opts.row_dtype],
                )
                for name, policy in zip(FEATURE_NAMES, policies, strict=True)
            ],
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids (26, B) int64 as embeddings (B, 26, D) float32."""
        # A bag per feature and sample, each of one id.
        lengths = torch.ones(ids.numel(), dtype=torch.int32, device=ids.device)
        features = KeyedJaggedTensor(keys=FEATURE_NAMES, values=ids.reshape(-1), lengths=lengths)
        embeddings: KeyedTensor = self.collection(features)
        in_order = embeddings.values()
        if embeddings.keys() != FEATURE_NAMES:  # sharding may change the order of the features
            (in_order,) = KeyedTensor.regroup([embeddings], [FEATURE_NAMES])
        return in_order.view(-1, CATEGORY_COUNT, self.embedding_dim)


class ShardedModel:
    """The model in DistributedModelParallel, its optimizers, and what there is to report.

    Args:
        opts: Of the job.
        policies: How ids come and go, by feature; None: they come, and stay.
        device: Of this rank.
    """

    def __init__(
        self, opts: Namespace, policies: Sequence[td.Policy] | None, device: torch.device
    ) -> None:
        policies = policies or [td.Policy()] * CATEGORY_COUNT
        torch.manual_seed(opts.seed)  # of the MLPs, as in one process, and of rows
        model = DLRM(CollectionRows(opts, policies), opts.embedding_dim)
        optimizer = row_optimizer(opts)
        planned = DynamicEmbeddingBagCollectionSharder(optimizer=optimizer)
        self._plan = _make_plan(model, opts, policies, planned)
        sharder = DynamicEmbeddingBagCollectionSharder(
            optimizer=optimizer, use_index_dedup=self._sends_once(opts)
        )
        self.parallel = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=device,
            plan=self._plan,
            sharders=[sharder],
        )
        parameters = dict(in_backward_optimizer_filter(self.parallel.named_parameters()))
        self.dense_optimizer = torch.optim.Adam(parameters.values(), lr=opts.dense_lr)
        dense = KeyedOptimizerWrapper(parameters, lambda _: self.dense_optimizer)
        # One optimizer to the outside: a learning rate schedule reaches MLPs and rows.
        self.optimizer = CombinedOptimizer([self.parallel.fused_optimizer, dense])

    def figures(self) -> Figures:
        """Return the numbers to report, of all ranks, which must call this together."""
        groups = {id(local.group): local.group for local in local_shards(self.parallel)}
        stats = {key: group.usage.tables() for key, group in groups.items()}
        names = ("size", "evicted", "rejected", "not_admitted")
        counts = torch.zeros(len(names), CATEGORY_COUNT, dtype=torch.int64)
        for local in local_shards(self.parallel):
            if local.shard.first_column > 0:
                continue  # its ids are those of a shard that is counted
            of_table = stats[id(local.group)][local.group.names[local.number]]
            feature = FEATURE_NAMES.index(local.shard.name)
            counts[:, feature] += torch.tensor([getattr(of_table, name) for name in names])
        table_bytes = torch.tensor(
            [sum(group.usage.memory()["total"] for group in groups.values())]
        )
        sums = torch.cat([counts.flatten(), table_bytes]).to(self.parallel.device)
        dist.all_reduce(sums)
        counts = sums[:-1].cpu().view_as(counts)
        ids, evicted, rejected, not_admitted = counts.sum(1).tolist()
        return Figures(
            ids=ids,
            table_bytes=int(sums[-1]),
            evicted=evicted,
            rejected=rejected,
            not_admitted=not_admitted,
            ids_by_feature=tuple(counts[0].tolist()),
            evicted_by_feature=tuple(counts[1].tolist()),
            storage=_storage_of_all(groups.values()),
        )

    def _sends_once(self, opts: Namespace) -> bool:
        """Return whether to send an id that a rank's batch has often once, and its row, too.

        That takes less time over gloo, with tables of any of these kinds; not measured on GPUs.
        """
        kinds = {ShardingType.ROW_WISE.value, ShardingType.TABLE_WISE.value}
        several = dist.get_world_size() > 1 and opts.device == "cpu"
        return several and kinds.issuperset(self.sharding_types().values())

    def sharding_types(self) -> dict[str, str]:
        """Return how every table is sharded."""
        return {name: table.sharding_type for name, table in self._shardings().items()}

    def describe_plan(self) -> str:
        """Return which tables lie how and where, a line for all tables that lie alike."""
        alike: dict[str, list[str]] = {}
        for name, table in self._shardings().items():
            ranks = ", ".join(map(str, sorted(set(table.ranks or []))))
            alike.setdefault(f"{table.sharding_type} on ranks {ranks}", []).append(name)
        lines = [f"{how}: {len(names)} tables, {', '.join(names)}" for how, names in alike.items()]
        return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ") for line in lines)

    def _shardings(self) -> dict[str, ParameterSharding]:
        (plan,) = self._plan.plan.values()  # of the only module that is sharded
        return dict(plan)


def _storage_of_all(groups: Iterable[TableGroup]) -> StorageStats | None:
    """Add up what the caches and files of all ranks have done; None: all rows are in memory."""
    mine = [stats for group in groups if (stats := group.usage.storage()) is not None]
    names = [field.name for field in fields(StorageStats)]
    sums = [[sum(getattr(stats, name) for stats in mine) for name in names], [len(mine)]]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, sums)
    if not any(count for _, (count,) in everyones):
        return None
    columns = zip(*(numbers for numbers, _ in everyones), strict=True)
    return StorageStats(**dict(zip(names, map(sum, columns), strict=True)))


def _make_plan(
    model: nn.Module,
    opts: Namespace,
    policies: Sequence[td.Policy],
    sharder: ModuleSharder[nn.Module],
) -> ShardingPlan:
    """Let TorchRec's planner say where tables lie: rank 0 plans, all get its plan.

    Raises:
        ValueError: The tables cannot be sharded that way.
    """
    world_size = dist.get_world_size()
    topology = Topology(
        world_size=world_size,
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        compute_device=opts.device,
    )
    columns = -(-opts.embedding_dim // world_size)
    initializer = td.Uniform(-ROW_BOUND, ROW_BOUND)
    storage = storage_of(opts)
    constraints = {
        name: DynamicTableConstraints(
            TableOptions(initializer=initializer, policy=policy, storage=storage),
            sharding_types=None if opts.sharding == "auto" else [opts.sharding],
            min_partition=max(_LEAST_COLUMNS, -(-columns // _LEAST_COLUMNS) * _LEAST_COLUMNS),
        )
        for name, policy in zip(FEATURE_NAMES, policies, strict=True)
    }
    planner = DynamicEmbeddingShardingPlanner(
        topology=topology, batch_size=max(1, opts.batch_size // world_size), constraints=constraints
    )
    return planner.collective_plan(model, [sharder], dist.group.WORLD)
