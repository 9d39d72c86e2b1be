"""Collections, sharders and machines to plan for."""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
)

BATCH = 512


def sharders(
    kind: EmbOptimType = EmbOptimType.EXACT_SGD, *, optimizer: OptimizerConfig | None = None
) -> list[Any]:
    params = {"optimizer": kind}
    return [
        DynamicEmbeddingBagCollectionSharder(fused_params=params, optimizer=optimizer),
        DynamicEmbeddingCollectionSharder(fused_params=params, optimizer=optimizer),
    ]


def bags(dtype: DataType = DataType.FP32, **rows: int) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=16,
            num_embeddings=count,
            feature_names=[f"f_{name}"],
            data_type=dtype,
        )
        for name, count in rows.items()
    ]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=tables)


def sequences(**rows: int) -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(
            name=name, embedding_dim=16, num_embeddings=count, feature_names=[f"f_{name}"]
        )
        for name, count in rows.items()
    ]
    return EmbeddingCollection(device=torch.device("meta"), tables=tables)


def machine(ranks: int = 2, *, device: str = "cpu", memory: int = 1 << 30) -> Topology:
    return Topology(
        world_size=ranks, local_world_size=ranks, compute_device=device, hbm_cap=memory,
        ddr_cap=memory,
    )  # fmt: skip


def nothing_reserved() -> FixedPercentageStorageReservation:
    return FixedPercentageStorageReservation(percentage=0.0)
