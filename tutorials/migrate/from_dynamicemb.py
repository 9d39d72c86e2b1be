"""From DynamicEmb: the same program with other imports, and its dumps.

DynamicEmb needs a GPU. Where it is installed, its own planner and sharder train and dump; where it
is not, those of ``torch_dynemb.compat.dynamicemb`` do, of the same names and arguments, on the CPU.
Either way the dump is in DynamicEmb's files, which a model without TorchRec loads at the end.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_dynemb as td
from torch_dynemb import migrate

DIM = 8


def trained(names: Any, device: torch.device) -> Any:
    """Return a sharded model after some steps; everything in here is as it was before."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from torchrec import DataType, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import Topology

    config = EmbeddingConfig(
        name="users",
        embedding_dim=DIM,
        num_embeddings=1 << 12,
        feature_names=["user"],
        data_type=DataType.FP32,
    )
    model = torch.nn.ModuleDict(
        {"sparse": EmbeddingCollection(tables=[config], device=torch.device("meta"))}
    )
    options = names.DynamicEmbTableOptions(
        global_hbm_for_values=1 << 20,
        score_strategy=names.DynamicEmbScoreStrategy.LFU,
        initializer_args=names.DynamicEmbInitializerArgs(),
    )
    constraints = {
        "users": names.DynamicEmbParameterConstraints(
            sharding_types=["row_wise"], use_dynamicemb=True, dynamicemb_options=options
        )
    }
    topology = Topology(world_size=dist.get_world_size(), compute_device=device.type)
    planner = names.DynamicEmbeddingShardingPlanner(
        eb_configs=[config],
        topology=topology,
        constraints=constraints,
        enumerator=names.DynamicEmbeddingEnumerator(topology=topology, constraints=constraints),
    )
    sharder = names.DynamicEmbeddingCollectionSharder(
        fused_params={
            "optimizer": EmbOptimType.ADAM,
            "learning_rate": 0.05,
            "output_dtype": SparseType.FP32,
        },
        use_index_dedup=True,
    )
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    for step in range(10):
        ids = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(step))
        features = KeyedJaggedTensor(["user"], ids.to(device), lengths=torch.ones(64).int())
        sharded.module["sparse"](features.to(device))["user"].values().square().sum().backward()
    return sharded


def main() -> None:
    """Train, dump, and load the dump."""
    if importlib.util.find_spec("torchrec") is None:
        print("TorchRec is not installed: see the Makefile for how to install it on this machine")
        return
    installed = importlib.util.find_spec("dynamicemb") is not None and torch.cuda.is_available()
    if not installed:
        print("DynamicEmb is not installed: its names are those of torch_dynemb.compat.dynamicemb")
    names = importlib.import_module("dynamicemb" if installed else "torch_dynemb.compat.dynamicemb")
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("nccl" if installed else "gloo", **alone)
    try:
        torch.manual_seed(0)
        old = trained(names, torch.device("cuda" if installed else "cpu"))
        with tempfile.TemporaryDirectory() as folder:
            names.DynamicEmbDump(f"{folder}/dump", old, optim=True)
            files = sorted(path.name for path in Path(folder, "dump/model.sparse").iterdir())
            new = td.DynamicEmbedding(
                DIM, optimizer=td.Adam(lr=0.05), policy=td.Policy(score="frequency")
            )
            source = migrate.read_dynamicemb(f"{folder}/dump/model.sparse", "users")
            report = migrate.load(new, source)["embedding"]
    finally:
        dist.destroy_process_group()
    score = new.group.scores.get(0, torch.arange(1000))
    result = {"files": len(files), "ids": report.ids, "fresh": report.fresh}
    print(json.dumps({**result, "occurrences": int(score.scores[score.found].sum())}))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
