"""Steps of test_replicas: static tables, dense parts and RecIS beside dynamic tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from replica_models import (
    DEFAULT,
    GROUP,
    ROWS,
    batch_of,
    check_equal,
    of_all,
    replicas_of,
    replicated,
)
from sharded_models import Model, Table, module_plan
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingPlan

import torch_dynemb as td
from torch_dynemb.parts.table_parts import parts_of
from torch_dynemb.recis import DynamicEmbedding, EmbeddingOption
from torch_dynemb.table.tables import exported
from torch_dynemb.torchrec import (
    DynamicDMPCollection,
    DynamicEmbeddingBagCollectionSharder,
)


class Scored(nn.Module):
    """A model with a dense part, which DistributedDataParallel averages."""

    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        self.bags = model.bags
        self.dense = nn.Linear(width, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        scores: torch.Tensor = self.dense(self.bags(features).values()).squeeze(1)
        return scores


def static_beside_dynamic(rank: int) -> list[Any]:
    """Train static tables, dynamic ones and a dense part; return what a sync has made equal."""
    tables = (
        Table("rows", 8, ("a",)),
        Table("static", 8, ("b",), dynamic=False, num_embeddings=24),
    )
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    model = Model(tables, False)
    sharder = DynamicEmbeddingBagCollectionSharder(
        options={"rows": DEFAULT}, optimizer=td.RowWiseAdagrad(lr=0.1), fused_params=fused
    )
    plan = ShardingPlan({"bags": module_plan(model.bags, tables, sharder, ranks=GROUP)})
    torch.manual_seed(0)
    job = DynamicDMPCollection(
        Scored(model, 16),
        device=torch.device("cpu"),
        plan=plan,
        world_size=dist.get_world_size(),
        sharding_group_size=GROUP,
        global_pg=dist.group.WORLD,
        sharders=[sharder],
    )
    optimizer = torch.optim.SGD(job.module.dense.parameters(), lr=0.1)
    (static,) = job._default_ctx.weights_by_dtype.values()
    means = []
    for turn in range(2):
        for step in range(2):
            seed = 100 * turn + 10 * rank + step
            job(batch_of(tables, 24, seed)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            job.fused_optimizer.step()
        of_groups = replicas_of(job, [of.clone() for of in static])
        job.sync()
        check_equal(job)
        means += [
            (sum(of) / 2 - own).abs().max().item()
            for *of, own in zip(*of_groups, static, strict=True)
        ]
    dense = [of.tolist() for of in of_all(job.module.dense.weight.detach())]
    return [means, dense, [of.tolist() for of in replicas_of(job, static[0].clone())]]


def synced_bytes(rank: int, ids: int, touched: Sequence[int]) -> list[tuple[int, int]]:
    """Bytes that a rank sends to sync a dynamic table, and a static one of the same rows.

    Args:
        ids: of both tables, with a value of state per row.
        touched: ids that each group trains before a sync.
    """
    tables = (Table("rows", 16, ("a",), num_embeddings=ids),)
    static = (replace(tables[0], dynamic=False),)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    ours = replicated(tables, optimizer=td.RowWiseAdagrad(lr=0.1))
    theirs = replicated(static, fused_params=fused, custom_all_reduce=_counted)
    result = []
    for count in (ids, *touched):
        some = torch.arange(count) * (ids // max(count, 1))
        features = KeyedJaggedTensor(["a"], some, lengths=torch.tensor([count]))
        _reduced.clear()
        for model in (ours, theirs):
            model(features)["a"].sum().backward()
            model.fused_optimizer.step()
            model.sync()
        check_equal(ours)
        assert ours.last_sync is not None
        # a ring all-reduce sends each byte 2 (n - 1) / n times
        groups = ours.replica_group.size()
        result.append((ours.last_sync.sent_bytes, sum(_reduced) * 2 * (groups - 1) // groups))
    return result[1:]


_reduced: list[int] = []


def _counted(tensors: list[torch.Tensor]) -> None:
    _reduced.extend(tensor.nbytes for tensor in tensors)


class WithItems(nn.Module):
    """A collection of TorchRec, and a module of RecIS in the same model."""

    def __init__(self, model: Scored, items: nn.Module) -> None:
        super().__init__()
        self.scored, self.items = model, items

    def forward(self, features: KeyedJaggedTensor, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scored(features)[:2] + self.items(ids).sum(1)
        return scores


def recis_beside(rank: int) -> tuple[str, list[int]]:
    """Train RecIS's module, which all ranks share, beside a table that sharding groups copy.

    Returns:
        The error of a model that has both, and the ids of RecIS's table on this rank.
    """
    sharder = DynamicEmbeddingBagCollectionSharder(
        options={"rows": DEFAULT}, optimizer=td.SGD(lr=0.1)
    )
    assert dist.group.WORLD is not None

    def job_of(model: nn.Module, path: str, bags: Any) -> DynamicDMPCollection:
        assert dist.group.WORLD is not None
        return DynamicDMPCollection(
            model,
            device=torch.device("cpu"),
            plan=ShardingPlan({path: module_plan(bags, ROWS, sharder, ranks=GROUP)}),
            world_size=dist.get_world_size(),
            sharding_group_size=GROUP,
            global_pg=dist.group.WORLD,
            sharders=[sharder],
        )

    items = DynamicEmbedding(EmbeddingOption(embedding_dim=8, shared_name="items", combiner="sum"))
    inside = Scored(Model(ROWS, False), 8)
    together = job_of(WithItems(inside, items), "scored.bags", inside.bags)
    ids = torch.arange(8).view(2, 4) + 4 * rank
    error = ""
    try:
        together(batch_of(ROWS, 24, rank), ids)
    except td.errors.ReplicatedTableError as raised:
        error = str(raised)
    alone = Scored(Model(ROWS, False), 8)
    job = job_of(alone, "bags", alone.bags)
    for step in range(2):
        scores = job(batch_of(ROWS, 24, 10 * rank + step))[:2] + items(ids + step).sum(1)
        scores.square().sum().backward()
        job.fused_optimizer.step()
    job.sync()
    check_equal(job)
    return error, [
        id
        for part in parts_of(items)
        for batch in exported(part.group.tables, part.table, 1 << 20)
        for id in batch.ids.tolist()
    ]
