"""DLRM as TorchRec's ``dlrm_main.py`` trains it, with static or dynamic tables.

``torchrun --nproc-per-node 2 tests/programs/dlrm_run.py dynamic`` prints a line of JSON for each
rank. Ids are 64-bit hashes; the static run maps them to its rows.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingShardingPlanner,
    table_sizes,
)

NAMES = [f"cat_{number}" for number in range(4)]
ROWS = 1000  # of a static table
IDS = 500  # of each feature
BATCH = 128
CPU = torch.device("cpu")


def batches(rank: int, steps: range, static: bool) -> Iterator[Batch]:
    """Clicks depend on the hidden weights of ids."""
    common = torch.Generator().manual_seed(1)
    weights = torch.randn(len(NAMES), IDS, generator=common)
    hashes = torch.randint(-(2**62), 2**62, (len(NAMES), IDS), generator=common)
    if static:
        hashes %= ROWS
    features = torch.arange(len(NAMES))[:, None]
    for step in steps:
        draw = torch.Generator().manual_seed(10 * step + rank)
        drawn = torch.randint(0, IDS, (len(NAMES), BATCH), generator=draw)
        logits = weights[features, drawn].sum(0)
        yield Batch(
            dense_features=torch.randn(BATCH, 4, generator=draw),
            sparse_features=KeyedJaggedTensor(
                keys=NAMES,
                values=hashes[features, drawn].flatten(),
                lengths=torch.ones(len(NAMES) * BATCH, dtype=torch.int32),
            ),
            labels=(logits + torch.randn(BATCH, generator=draw) > 0).int(),
        )


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Area under the ROC curve, of scores without ties."""
    ranks = scores.argsort().argsort().double() + 1
    positive = labels.bool()
    good = int(positive.sum())
    area = ranks[positive].sum() - good * (good + 1) / 2
    return float(area / (good * (len(labels) - good)))


def run(static: bool) -> dict[str, float]:
    """Train and evaluate; return the AUC of a rank's samples, and ids of all ranks."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    tables = [
        EmbeddingBagConfig(name=f"t_{n}", embedding_dim=16, num_embeddings=ROWS, feature_names=[n])
        for n in NAMES
    ]
    model = DLRMTrain(
        DLRM(
            embedding_bag_collection=EmbeddingBagCollection(tables, device=torch.device("meta")),
            dense_in_features=4,
            dense_arch_layer_sizes=[32, 16],
            over_arch_layer_sizes=[32, 1],
        )
    )
    apply_optimizer_in_backward(
        torch.optim.Adagrad, model.model.sparse_arch.parameters(), {"lr": 0.1}
    )
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
    sharder, planner = EmbeddingBagCollectionSharder(), EmbeddingShardingPlanner(topology=topology)
    if not static:
        sharder = DynamicEmbeddingBagCollectionSharder(tables="all")
        planner = DynamicEmbeddingShardingPlanner(topology=topology)
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
    dense_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
    training = batches(rank, range(150), static)
    for _ in range(150):
        pipeline.progress(training)
    model.eval()
    evaluation = TrainPipelineSparseDist(model, optimizer, CPU)
    held_out = batches(rank, range(1000, 1020), static)
    outputs = [evaluation.progress(held_out) for _ in range(20)]
    scores, labels = (torch.cat([out[at] for out in outputs]) for at in (1, 2))
    sizes = {} if static else table_sizes(model)
    return {"rank": rank, "auc": auc(scores, labels), "ids": sum(sizes.values())}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # TorchRec's own
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(json.dumps(run(sys.argv[1] == "static")))
    dist.destroy_process_group()
