"""TorchRec's static tables with the fused kernel, on the ranks that there are."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter
from whole_job.models import DENSE_LEARNING_RATE, DIM, EPS, LEARNING_RATE, Candidate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

from tutorials.dlrm.data import FEATURE_NAMES
from tutorials.dlrm.model import DLRM, ROW_BOUND

_OPTIMIZERS = {
    "rowwise-adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}


class _CollectionRows(nn.Module):
    """An EmbeddingBagCollection that is given row numbers (26, B) int64."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.collection = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    num_embeddings=size,
                    embedding_dim=DIM,
                    name=name,
                    feature_names=[name],
                    weight_init_min=-ROW_BOUND,
                    weight_init_max=ROW_BOUND,
                )
                for name, size in zip(FEATURE_NAMES, sizes, strict=True)
            ],
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows (B, 26, DIM)."""
        lengths = torch.ones(rows.numel(), dtype=torch.int32)
        features = KeyedJaggedTensor(FEATURE_NAMES, rows.reshape(-1), lengths=lengths)
        embeddings: KeyedTensor = self.collection(features)
        if embeddings.keys() == FEATURE_NAMES:
            in_order = embeddings.values()
        else:
            (in_order,) = KeyedTensor.regroup([embeddings], [FEATURE_NAMES])
        return in_order.view(-1, len(rows), DIM)


def static_candidate(optimizer: str, sizes: Sequence[int]) -> Candidate:
    """Return the job's model in DistributedModelParallel, each table on one rank, in turn.

    Without a process group, this process is the only rank of one.

    Args:
        optimizer: of the rows, a key of the fused optimizers that are compared.
        sizes: rows by feature.
    """
    if not dist.is_initialized():
        join_alone()
    ranks = dist.get_world_size()
    model = DLRM(_CollectionRows(sizes), DIM)
    sharder = EmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": _OPTIMIZERS[optimizer],
            "learning_rate": LEARNING_RATE,
            "eps": EPS,
        }
    )
    kernel = EmbeddingComputeKernel.FUSED.value
    plan = construct_module_sharding_plan(
        model.rows.collection,
        {
            name: table_wise(rank=t % ranks, compute_kernel=kernel)
            for t, name in enumerate(FEATURE_NAMES)
        },
        sharder=sharder,
        local_size=ranks,
        world_size=ranks,
        device_type="cpu",
    )
    parallel = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"rows.collection": plan}),
        sharders=[sharder],
    )
    dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    adam = torch.optim.Adam(dense.values(), lr=DENSE_LEARNING_RATE)
    return Candidate(parallel, [adam], takes_rows=True, fullgraph=False)


def join_alone() -> None:
    """Make a process group of this process alone."""
    alone = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(alone)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
