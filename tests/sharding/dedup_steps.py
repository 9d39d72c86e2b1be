"""What the ranks of test_dedup do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    TableOptions,
)
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL

FEATURES = ["viewed", "bought", "user"]


@dataclass(frozen=True)
class Case:
    collection: str
    sharding_type: str
    kind: str


def _model(case: Case, *, dedup: bool) -> DistributedModelParallel:
    device = torch.device("meta")
    mean = {"mean": ("ads", "users"), "two kernels": ("ads",)}.get(case.kind, ())
    one_dim = case.collection == "sequence" or case.kind == "two kernels"
    dims = {"ads": 8, "users": 8 if one_dim else 12}
    features = {"ads": FEATURES[:2], "users": FEATURES[2:]}
    shared: dict[str, Any] = {"num_embeddings": 50}
    module: torch.nn.Module
    sharder: Any
    policy = td.Policy(admission=td.AdmitFrequent(3)) if case.kind == "counted" else td.Policy()
    options = {
        name: TableOptions(initializer=td.Normal(), policy=policy) for name in ("ads", "users")
    }
    if case.collection == "pooled":
        tables = [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=dims[name],
                feature_names=features[name],
                pooling=PoolingType.MEAN if name in mean else PoolingType.SUM,
                **shared,
            )
            for name in dims
        ]
        weighted = case.kind == "weighted"
        module = EmbeddingBagCollection(tables=tables, is_weighted=weighted, device=device)
        sharder = DynamicEmbeddingBagCollectionSharder(
            use_index_dedup=dedup, options=options, optimizer=td.Adam(lr=0.1)
        )
    else:
        configs = [
            EmbeddingConfig(
                name=name, embedding_dim=dims[name], feature_names=features[name], **shared
            )
            for name in dims
        ]
        module = EmbeddingCollection(tables=configs, device=device)
        sharder = DynamicEmbeddingCollectionSharder(
            use_index_dedup=dedup, options=options, optimizer=td.Adam(lr=0.1)
        )
    types = {
        "row_wise": lambda rank: row_wise(compute_kernel=DYNAMIC_KERNEL),
        "table_wise": lambda rank: table_wise(rank=rank, compute_kernel=DYNAMIC_KERNEL),
        "column_wise": lambda rank: column_wise(ranks=[0, 1], compute_kernel=DYNAMIC_KERNEL),
    }
    plan = construct_module_sharding_plan(
        module,
        {name: types[case.sharding_type](rank) for rank, name in enumerate(dims)},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    return DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )


def batch(case: Case, rank: int, step: int) -> KeyedJaggedTensor:
    """Ids that repeat within a batch, within a table and between ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    size = 4 + 3 * rank * (case.kind == "variable batch")
    lengths = torch.randint(0, 5, (len(FEATURES) * size,), generator=generator)
    if case.kind == "empty rank" and rank == 1:
        lengths.zero_()
    count = int(lengths.sum())
    ids = torch.randint(0, 9, (count,), generator=generator) * 2**59 - 3
    weights = torch.rand(count, generator=generator) if "weight" in case.kind else None
    return KeyedJaggedTensor(keys=FEATURES, values=ids, lengths=lengths, weights=weights)


def _outputs(output: Any) -> dict[str, Tensor]:
    values = output.wait() if hasattr(output, "wait") else output
    if hasattr(values, "to_dict"):
        by_name: dict[str, Tensor] = values.to_dict()
        return by_name
    return {name: jagged.values() for name, jagged in values.items()}


def train(rank: int, case: Case) -> float:
    """The largest difference of outputs in some steps with and without dedup."""
    torch.manual_seed(0)
    models = [_model(case, dedup=dedup) for dedup in (False, True)]
    largest = 0.0
    for step in range(4):
        features = batch(case, rank, step)
        outputs = [_outputs(model(features)) for model in models]
        for name, plain in outputs[0].items():
            deduped = outputs[1][name]
            assert plain.shape == deduped.shape
            largest = max([largest, *(plain - deduped).abs().flatten().tolist()])
        for output in outputs:
            weights = (torch.arange(float(v.numel())).view(v.shape).cos() for v in output.values())
            loss = sum((v * w).sum() for v, w in zip(output.values(), weights, strict=True))
            assert isinstance(loss, Tensor)
            loss.backward()
    return largest


def ids_sent(rank: int, collection: str) -> tuple[int, int]:
    """How many ids a batch sends, and how many distinct ids its tables have."""
    case = Case(collection, "row_wise", "plain")
    model = _model(case, dedup=True)
    features = batch(case, rank, 0)
    sent = []
    forward = KJTAllToAllForward.__call__

    def counting(self: KJTAllToAllForward, input: KeyedJaggedTensor) -> Any:
        sent.append(input.values().numel())
        return forward(self, input)

    with mock.patch.object(KJTAllToAllForward, "__call__", counting):
        _outputs(model(features))
    jagged = features.to_dict()
    ads = torch.cat([jagged[name].values() for name in FEATURES[:2]])
    distinct = ads.unique().numel() + jagged["user"].values().unique().numel()
    assert distinct < features.values().numel()
    return sum(sent), distinct


def refuse_column_wise(rank: int) -> str:
    try:
        _model(Case("pooled", "column_wise", "plain"), dedup=True)
    except ValueError as error:
        return str(error)
    return "nothing"
