"""What the ranks of test_sharded_storage do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from emulated_groups import emulated_cuda
from pipeline_steps import optimizer_of
from record_dict import RecordDict
from sharded_models import generator
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import torch_dynemb as td
from torch_dynemb.storage.tiers import Storage
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    PrefetchTrainPipeline,
    TableOptions,
)
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL

FEATURES = ["ad", "user", "page", "topic"]
IDS = 240  # of a feature: several times what a cache holds
STEPS = 16
SAMPLES = 6
TABLES = {"rows": "ad", "whole": "user"}  # by name its feature; each is pooled and per id
SLOTS = 64  # the fewest that a cache may have
GPU_KINDS = ("hbm", "cache", "cache above a disk")


class Model(nn.Module):
    """Tables by rows and whole, pooled and per id; by columns and static, pooled; a dense part."""

    def __init__(self) -> None:
        super().__init__()
        shared: dict[str, Any] = {"embedding_dim": 8, "num_embeddings": IDS}
        bags = [
            EmbeddingBagConfig(name=name, feature_names=[feature], **shared)
            for name, feature in {**TABLES, "split": "topic", "static": "page"}.items()
        ]
        rows = [
            EmbeddingConfig(name=name, feature_names=[feature], **shared)
            for name, feature in TABLES.items()
        ]
        meta = torch.device("meta")
        self.pooled = EmbeddingBagCollection(tables=bags, device=meta)
        self.sequence = EmbeddingCollection(tables=rows, device=meta)
        self.dense = nn.Linear(32, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        score = self.dense(self.pooled(features).values()).squeeze(1)
        sequence = self.sequence(features)
        users, ads = sequence["user"].values(), sequence["ad"].values()
        loss = score.square().mean() + (users.square().sum() + ads.square().sum()) / 100
        return loss, torch.cat([score, users.flatten(), ads.flatten()])


class Trained(NamedTuple):
    """What training gives.

    Attributes:
        outputs: of every step.
        rows: outputs of evaluation of all ids.
        sizes: ids of this rank, by kernel and table.
        stats: of the caches after training, by kernel.
        stored: tables of which the store has records.
    """

    outputs: list[Tensor]
    rows: list[Tensor]
    sizes: list[dict[str, int]]
    stats: list[Any]
    stored: list[str]


def storage_of(kind: str, path: str) -> Storage | None:
    """Tables' storage: in memory, a HostStore, in a dict of this rank, or on a disk."""
    cache = f"{SLOTS} rows"
    if kind in ("memory", "hbm"):
        return None
    if kind == "cache":
        return td.HostStore(cache=cache)
    if kind == "host":
        return td.HostStore(hbm="1MB")
    if kind == "dict":
        return td.ExternalStore(RecordDict(), cache=cache)
    above = cache if kind == "cache above a disk" else None
    return td.SSDStore(
        path, cache=cache, segment="64KiB", disk="64MB", io="threads", device_cache=above
    )


def model_of(storage: Storage | None, *, dedup: bool = False) -> DistributedModelParallel:
    """A sharded model.

    Args:
        storage: of all dynamic tables.
    """
    torch.manual_seed(0)
    model = Model()
    # one that drops ids, too: their rows come back with other owners
    of_all = {
        name: TableOptions(initializer=td.Normal(), storage=storage, policy=policy)
        for name, policy in {
            "rows": td.Policy(score="frequency", capacity=160),
            "whole": td.Policy(),
            "split": td.Policy(),
        }.items()
    }
    shared: dict[str, Any] = {"options": of_all, "optimizer": td.Adam(lr=0.1)}
    sharders = [
        DynamicEmbeddingBagCollectionSharder(use_index_dedup=dedup, **shared),
        DynamicEmbeddingCollectionSharder(use_index_dedup=dedup, **shared),
    ]
    dynamic = {"compute_kernel": DYNAMIC_KERNEL}
    shardings = {"rows": row_wise(**dynamic), "whole": table_wise(rank=1, **dynamic)}
    # ids that are sent once go to rows, not to columns
    split = "table_wise" if dedup else "column_wise"
    world: dict[str, Any] = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    plans = {
        "pooled": construct_module_sharding_plan(
            model.pooled,
            {
                **shardings,
                "split": generator(split, DYNAMIC_KERNEL, 0),
                "static": table_wise(rank=0),
            },
            sharders[0],
            **world,
        ),
        "sequence": construct_module_sharding_plan(model.sequence, shardings, sharders[1], **world),
    }
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plans),
        sharders=sharders,
    )


def batches(rank: int) -> Iterator[KeyedJaggedTensor]:
    """Those of training: every step has other ids, and some of a step before."""
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        lengths = torch.randint(0, 6, (len(FEATURES), SAMPLES), generator=drawn)
        ids = torch.randint(0, IDS, (int(lengths.sum()),), generator=drawn)
        yield KeyedJaggedTensor(keys=FEATURES, values=ids, lengths=lengths.flatten())


def whole_vocabulary() -> Iterator[KeyedJaggedTensor]:
    """Every id of every feature."""
    for ids in torch.arange(IDS).split(16):
        values = ids.repeat(len(FEATURES))
        yield KeyedJaggedTensor(
            keys=FEATURES, values=values, lengths=torch.ones_like(values, dtype=torch.int32)
        )


def trained(rank: int, kind: str, path: str, prefetching: bool, dedup: bool) -> Trained:
    """Trains a model.

    Args:
        kind: of storage; see :func:`storage_of`; those of ``GPU_KINDS`` are emulated.
        path: of the files.
        prefetching: with the pipeline that prefetches.
    """
    with emulated_cuda() if kind in GPU_KINDS else nullcontext():
        return _trained(rank, kind, path, prefetching, dedup)


def _trained(rank: int, kind: str, path: str, prefetching: bool, dedup: bool) -> Trained:
    storage = storage_of(kind, path)
    model = model_of(storage, dedup=dedup)
    optimizer = optimizer_of(model)
    outputs = []
    if prefetching:
        pipeline = PrefetchTrainPipeline(model, optimizer, torch.device("cpu"))
        stream = batches(rank)
        while True:
            try:
                outputs.append(pipeline.progress(stream).detach())
            except StopIteration:
                break
        pipeline.detach()
    else:
        for features in batches(rank):
            optimizer.zero_grad()
            loss, output = model(features)
            loss.backward()
            optimizer.step()
            outputs.append(output.detach())
    groups = [kernel.tables.group for kernel in _kernels(model)]
    stats = [group.usage.storage() for group in groups]
    model.eval()
    with torch.no_grad():
        rows = [model(features)[1] for features in whole_vocabulary()]
    stored = sorted(storage.store.records) if isinstance(storage, td.ExternalStore) else []
    if isinstance(storage, td.SSDStore):
        dist.barrier()  # the other rank has its directories, too
        found = Path(path).rglob("LOCK")
        stored = sorted(str(lock.parent.relative_to(path)) for lock in found)
    return Trained(outputs, rows, [group.sizes() for group in groups], stats, stored)


def _kernels(model: DistributedModelParallel) -> Iterator[Any]:
    for module in (model.module.pooled, model.module.sequence):
        yield from module.kernels()
