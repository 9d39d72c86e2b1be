"""What the ranks of test_pipelines do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    TableOptions,
    table_sizes,
)
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL

FEATURES = ["ad", "user", "country"]


class Model(nn.Module):
    """Pooled and sequence tables, dynamic and static ones, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")
        shared: dict[str, Any] = {"embedding_dim": 32, "num_embeddings": 40}
        bags = [
            EmbeddingBagConfig(name="ads", feature_names=["ad"], **shared),
            EmbeddingBagConfig(name="users", feature_names=["user"], **shared),
            EmbeddingBagConfig(name="countries", feature_names=["country"], **shared),
        ]
        self.pooled = EmbeddingBagCollection(tables=bags, device=meta)
        rows = [EmbeddingConfig(name="history", feature_names=["ad"], **shared)]
        self.sequence = EmbeddingCollection(tables=rows, device=meta)
        self.dense = nn.Linear(96, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        score = self.dense(self.pooled(features).values()).squeeze(1)
        history = self.sequence(features)["ad"].values()
        return score.square().mean() + history.square().sum() / 100, score


def model_of(
    *,
    dedup: bool,
    codecs: Any = None,
    by_rows: bool = True,
    **options_of_tables: Any,
) -> DistributedModelParallel:
    """A sharded model.

    Args:
        options_of_tables: of all dynamic tables.
    """
    torch.manual_seed(0)
    model = Model()
    options = TableOptions(initializer=td.Normal(), **options_of_tables)
    shared: dict[str, Any] = {
        "use_index_dedup": dedup,
        "optimizer": td.Adam(lr=0.1),
        "qcomm_codecs_registry": codecs,
    }
    sharders = [
        DynamicEmbeddingBagCollectionSharder(
            fused_params={"learning_rate": 0.1},
            options={"ads": options, "users": options},
            **shared,
        ),
        DynamicEmbeddingCollectionSharder(options={"history": options}, **shared),
    ]
    dynamic = {"compute_kernel": DYNAMIC_KERNEL}
    world: dict[str, Any] = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    pooled = construct_module_sharding_plan(
        model.pooled,
        {
            "ads": row_wise(**dynamic) if by_rows else table_wise(rank=0, **dynamic),
            "users": table_wise(rank=1, **dynamic),
            "countries": row_wise() if by_rows else table_wise(rank=0),
        },
        sharder=sharders[0],
        **world,
    )
    sequence = construct_module_sharding_plan(
        model.sequence, {"history": row_wise(**dynamic)}, sharder=sharders[1], **world
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"pooled": pooled, "sequence": sequence}),
        sharders=sharders,
    )


def batches(rank: int) -> list[KeyedJaggedTensor]:
    result = []
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + rank)
        lengths = torch.randint(0, 4, (3, 8), generator=generator)
        ids = [
            torch.randint(0, 30, (int(lengths[feature].sum()),), generator=generator) * scale
            for feature, scale in enumerate((2**58, 2**40, 1))
        ]
        result.append(
            KeyedJaggedTensor(keys=FEATURES, values=torch.cat(ids), lengths=lengths.flatten())
        )
    return result


def optimizer_of(model: DistributedModelParallel) -> CombinedOptimizer:
    dense = KeyedOptimizerWrapper(
        {name: p for name, p in model.named_parameters() if "dense" in name},
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    return CombinedOptimizer([model.fused_optimizer, dense])


def losses(rank: int, dedup: bool) -> list[float]:
    """Scores of batches, without a pipeline."""
    model = model_of(dedup=dedup)
    optimizer = optimizer_of(model)
    result = []
    for features in batches(rank):
        optimizer.zero_grad()
        loss, score = model(features)
        loss.backward()
        optimizer.step()
        result.append(float(score.square().mean()))
    return result


def refused(rank: int, dedup: bool) -> tuple[list[float], list[str]]:
    """Scores of batches in a pipeline, and the errors of batches that rank 1 refuses.

    The third batch and the first one after a reset are wrong.
    """
    model = model_of(dedup=dedup)
    pipeline: Any = TrainPipelineSparseDist(
        model, optimizer_of(model), torch.device("cpu"), execute_all_batches=True
    )
    good = batches(rank)
    wrong = [
        KeyedJaggedTensor(keys=FEATURES, values=of.values().double(), lengths=of.lengths())
        for of in good
    ]
    if rank == 0:
        wrong = good
    scores: list[float] = []
    errors = []
    for stream in ([*good[:2], wrong[2], good[2]], [wrong[2], good[2]], good[2:]):
        remaining = iter(stream)
        try:
            while True:
                scores.append(float(pipeline.progress(remaining).square().mean()))
        except StopIteration:
            pass
        except TypeError as error:
            errors.append(str(error))
            pipeline.reset()
    return scores, errors


def quantized(rank: int, precision: str, dedup: bool) -> tuple[float, float]:
    """The largest differences of scores from those without quantization, and their size."""
    kind = CommType[precision]
    codecs = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=kind, backward_precision=kind),
        device=torch.device("cpu"),
    )
    # TorchRec has no sums of 8-bit numbers, so no row-wise pooling with them
    by_rows = precision != "INT8"
    plain = model_of(dedup=dedup, by_rows=by_rows)
    coded = model_of(dedup=dedup, codecs=codecs, by_rows=by_rows)
    largest = size = 0.0
    for features in batches(rank)[:3]:
        outputs = []
        for model in (plain, coded):
            loss, score = model(features)
            loss.backward()
            outputs.append(score.detach())
        largest = max(largest, float((outputs[0] - outputs[1]).abs().max()))
        size = max(size, float(outputs[0].abs().max()))
    return largest, size


def modes(rank: int) -> tuple[list[bool], list[bool], int, int]:
    """Whether lookups are in training mode after train() and eval(); ids before, after eval."""
    model = model_of(dedup=False)
    tables = model.module.pooled
    training = [kernel.tables.training for kernel in tables.kernels()]
    model.eval()
    reading = [kernel.tables.training for kernel in tables.kernels()]
    with torch.no_grad():
        model(batches(rank)[0])
    untouched = sum(sum(kernel.tables.sizes().values()) for kernel in tables.kernels())
    model.train()
    model(batches(rank)[0])
    inserted = sum(sum(kernel.tables.sizes().values()) for kernel in tables.kernels())
    return training, reading, untouched, inserted


def sizes(rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """Ids of all tables after a batch of each rank, and how many distinct ids those have."""
    model = model_of(dedup=False)
    model(batches(rank)[0])
    both = [batches(r)[0].to_dict() for r in range(2)]
    distinct = {
        name: torch.cat([batch[name].values() for batch in both]).unique().numel()
        for name in FEATURES
    }
    return table_sizes(model), distinct
