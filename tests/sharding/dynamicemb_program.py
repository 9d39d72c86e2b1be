"""A program written for NVIDIA's DynamicEmb: it imports ``dynamicemb`` and its modules alone.

Readers and stories have ids without a vocabulary. A dense layer scores a reader's story; ids of
regions get scores from the program itself.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from dynamicemb import (
    DynamicEmbDump,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbLoad,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
    get_sharded_table_capacity,
    get_table_value_bytes,
)
from dynamicemb.incremental_dump import get_score, incremental_dump, set_score
from dynamicemb.optimizer import EmbOptimType
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
)
from dynamicemb.shard import DynamicEmbeddingCollectionSharder
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor, nn
from torchrec import DataType, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation

DIM = 8
FEATURES = ("reader", "story", "region")
FAR = 1 << 40  # the first id: no table has as many rows
BATCH = 16
BUCKET = 128
CPU = torch.device("cpu")


class Scorer(nn.Module):
    """Scores the stories that readers have opened."""

    def __init__(self, sparse: EmbeddingCollection) -> None:
        super().__init__()
        self.sparse = sparse
        self.over = nn.Linear(DIM * len(FEATURES), 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.sparse(features)
        return self.over(torch.cat([rows[name].values() for name in FEATURES], 1))[:, 0]


def features_of(ids: Tensor) -> KeyedJaggedTensor:
    """One id of each feature for each sample.

    Args:
        ids: [features, samples].
    """
    return KeyedJaggedTensor(list(FEATURES), ids.flatten(), lengths=torch.ones(ids.numel()).int())


def batch(number: int) -> Tensor:
    """Ids of a rank's batch, [features, samples]; each batch has ids that no other has."""
    draw = torch.Generator().manual_seed(10 * number + dist.get_rank())
    common = torch.randint(20, (len(FEATURES), BATCH // 2), generator=draw)
    own = 100 * (number + 1) + torch.randint(20, (len(FEATURES), BATCH // 2), generator=draw)
    return FAR + torch.cat([common, own], 1)


class Program:
    """The model, its plan, and the optimizer of its dense part.

    Args:
        seed: of the dense part and of the tables.
        threshold: occurrences before an id gets a row; 0: each id gets one.
        prefetch: ``prefetch_pipeline`` of the fused_params.
    """

    def __init__(self, seed: int, threshold: int = 0, prefetch: bool = False) -> None:
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(dist.get_world_size()))
        torch.manual_seed(seed)
        tables = [
            EmbeddingConfig(
                name=f"{name}s",
                embedding_dim=DIM,
                num_embeddings=1000,
                feature_names=[name],
                data_type=DataType.FP32,
            )
            for name in FEATURES
        ]
        scorer = Scorer(EmbeddingCollection(tables=tables, device=torch.device("meta")))
        sharder = DynamicEmbeddingCollectionSharder(
            fused_params={
                "optimizer": EmbOptimType.ADAM,
                "learning_rate": 0.05,
                "beta1": 0.9,
                "beta2": 0.999,
                "weight_decay": 0,
                "eps": 0.001,
                "output_dtype": SparseType.FP32,
                "prefetch_pipeline": prefetch,
            },
            qcomm_codecs_registry=None,
            use_index_dedup=True,
        )
        plan = _planner(tables, threshold).collective_plan(
            scorer, [sharder], dist.GroupMember.WORLD
        )
        self.model = DistributedModelParallel(scorer, device=CPU, plan=plan, sharders=[sharder])
        self.dense = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def train(self, number: int) -> list[Tensor]:
        """Train with a batch; return its ids by feature."""
        set_score(self.model, {"model.sparse": {"regions": number + 1}})
        self.model.train()
        ids = batch(number)
        loss = (self.model(features_of(ids)) - (ids.sum(0) % 3)).square().mean()
        self.dense.zero_grad()
        loss.backward()
        self.dense.step()
        return list(ids)

    def answers(self, ids: Tensor) -> Tensor:
        """Scores of samples, without training."""
        self.model.eval()
        with torch.inference_mode():
            return self.model(features_of(ids)).clone()

    def rows(self, ids: Tensor) -> dict[str, Tensor]:
        """What evaluation reads for each feature: [samples, columns]."""
        self.model.eval()
        with torch.inference_mode():
            rows = self.model.module.sparse(features_of(ids))
            return {name: rows[name].values().clone() for name in FEATURES}

    def save(self, folder: str) -> None:
        """Save the state of this rank, and dump the tables."""
        os.makedirs(folder, exist_ok=True)
        state = {"model": self.model.state_dict(), "dense": self.dense.state_dict()}
        torch.save(state, f"{folder}/rank{dist.get_rank()}.pt")
        DynamicEmbDump(f"{folder}/tables", self.model, optim=True)

    def load(self, folder: str) -> None:
        """Load what :meth:`save` has written."""
        state = torch.load(f"{folder}/rank{dist.get_rank()}.pt", weights_only=True)
        self.model.load_state_dict(state["model"], strict=False)
        self.dense.load_state_dict(state["dense"])
        DynamicEmbLoad(f"{folder}/tables", self.model, optim=True)

    def score(self) -> Any:
        """The scores of the tables."""
        return get_score(self.model)

    def increment(self, since: Any) -> Any:
        """Ids and rows by a threshold, and the next threshold."""
        return incremental_dump(self.model, since)


def _planner(tables: list[EmbeddingConfig], threshold: int) -> DynamicEmbeddingShardingPlanner:
    ranks = dist.get_world_size()
    normal = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.NORMAL)
    zeros = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=0.0)
    constraints = {}
    for table in tables:
        own = table.name == "regions"
        strategy = DynamicEmbScoreStrategy.CUSTOMIZED if own else DynamicEmbScoreStrategy.STEP
        admission: dict[str, Any] = {}
        if threshold > 0:
            capacity = get_sharded_table_capacity(table, ranks, BUCKET)
            admission = {
                "admit_strategy": FrequencyAdmissionStrategy(threshold, initializer_args=zeros),
                "admission_counter": KVCounter(capacity=capacity),
            }
        constraints[table.name] = DynamicEmbParameterConstraints(
            sharding_types=["row_wise"],
            use_dynamicemb=True,
            dynamicemb_options=DynamicEmbTableOptions(
                global_hbm_for_values=get_table_value_bytes(
                    table, EmbOptimType.ADAM, ranks, BUCKET
                ),
                initializer_args=normal,
                score_strategy=strategy,
                bucket_capacity=BUCKET,
                **admission,
            ),
        )
    topology = Topology(
        world_size=ranks, local_world_size=ranks, compute_device="cpu", ddr_cap=1 << 40
    )
    return DynamicEmbeddingShardingPlanner(
        eb_configs=tables,
        topology=topology,
        constraints=constraints,
        batch_size=BATCH,
        enumerator=DynamicEmbeddingEnumerator(topology=topology, constraints=constraints),
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
        debug=False,
    )
