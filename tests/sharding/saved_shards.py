"""Files of TorchRec models with dynamic tables, in saved/; written by ``__main__``.

    PYTHONPATH=tests python tests/sharding/saved_shards.py

They are written anew as long as those of ``saved_files.py``; ``test_saved_shards.py`` reads them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from loaded_content import score_words
from planner_cases import bags, machine, nothing_reserved, sharders
from ranks import Ranks
from saved_files import SAVED, Numbers, keep, kept
from sharded_models import Table, kernels, sharded
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

import torch_dynemb as td
from torch_dynemb.compat import dynamicemb
from torch_dynemb.table.content import read_content, read_counts
from torch_dynemb.torchrec import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicPerfEstimator,
    DynamicStorageEstimator,
    DynamicTableConstraints,
    LoadPlanner,
    TableOptions,
    local_shards,
)
from torch_dynemb.torchrec.replicas.replica_sync import SyncStats
from torch_dynemb.torchrec.resharding.moves import ReshardedTable

DCP = SAVED / "dcp"
TABLES = (
    Table("ads", 4, ("viewed", "bought"), sharding="row_wise"),
    Table("users", 4, ("user",), pooling="mean", sharding="table_wise"),
    Table("shops", 8, ("shop",), sharding="column_wise"),
    Table("words", 4, ("query",), pooling="none", sharding="row_wise", data_type="FP16"),
)
FEATURES = [feature for table in TABLES for feature in table.features]
POLICIES = {
    "ads": td.Policy(score=("frequency", "step"), capacity=50),
    "users": td.Policy(admission=td.AdmitFrequent(2)),
    "shops": td.Policy(),
    "words": td.Policy(score="timestamp", ttl=500),
}


def model() -> DistributedModelParallel:
    """A model with tables of all kinds of sharding."""
    torch.manual_seed(0)
    options = {
        name: TableOptions(initializer=td.Normal(), policy=policy)
        for name, policy in POLICIES.items()
    }
    return sharded(TABLES, optimizer=td.Adam(lr=0.25, row_steps=True), options=options)


def train(of: DistributedModelParallel, rank: int, steps: range) -> None:
    """Train steps with batches that depend on the step's number and the rank."""
    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + rank)
        lengths = torch.randint(0, 3, (len(FEATURES) * 4,), generator=generator)
        ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator) * 2**58 - 11
        outputs = of(KeyedJaggedTensor(keys=FEATURES, values=ids, lengths=lengths))
        torch.stack([output.float().square().sum() for output in outputs.values()]).sum().backward()
        of.fused_optimizer.step()


def numbers_of(of: DistributedModelParallel) -> Numbers:
    """What this rank keeps of ids, by table and first column."""
    numbers: Numbers = {}
    for kernel in kernels(of):
        group = kernel.tables.group
        group.materialize()
        for table, shard in enumerate(kernel.tables.shards):
            content = read_content(group.tables, table)
            entries = {"ids": content.ids, "rows": content.rows, "scores": score_words(content)}
            entries |= content.state
            counts = read_counts(group.tables, table)
            if counts is not None:
                entries |= {"counted": counts.ids, "counts": counts.counts}
            place = f"{shard.name} {shard.first_column}"
            numbers |= {f"{place} {name}": value.clone() for name, value in entries.items()}
            numbers[f"{place} updates"] = group.rows.row_clock[table].clone()
    return numbers


def save(rank: int, path: str) -> Numbers:
    """Trains and writes a checkpoint."""
    of = model()
    train(of, rank, range(3))
    dcp.save({"model": of.state_dict()}, checkpoint_id=path)
    if rank == 0:
        keep(list(local_shards(of))[:1], "torchrec_shard.pt.gz")
    return numbers_of(of)


def load(rank: int, path: str) -> tuple[Numbers, Numbers, Numbers]:
    """What a rank has after it has read a checkpoint, has been trained, has read that again."""
    of, again = model(), model()
    train(of, rank, range(90, 91))
    state = {"model": of.state_dict()}
    dcp.load(state, checkpoint_id=path, planner=LoadPlanner())
    of.load_state_dict(state["model"])
    restored = numbers_of(of)
    train(of, rank, range(3, 5))
    again.load_state_dict(of.state_dict())
    return restored, numbers_of(of), numbers_of(again)


def values() -> dict[str, Any]:
    """Instances of the classes that are not sharded modules."""
    options = TableOptions(
        initializer=td.Uniform(-0.5, 0.5),
        policy=td.Policy(capacity=500, score="timestamp", ttl=3),
        feature_policies={"f_a": td.FeaturePolicy(ttl=7)},
        padding_idx=7,
        delayed_gradients="apply",
        split=True,
    )
    arguments = dynamicemb.DynamicEmbInitializerArgs(
        mode=dynamicemb.DynamicEmbInitializerMode.NORMAL, mean=0.5
    )
    other = dynamicemb.DynamicEmbTableOptions(
        initializer_args=arguments,
        score_strategy=dynamicemb.DynamicEmbScoreStrategy.LFU,
        safe_check_mode=dynamicemb.DynamicEmbCheckMode.WARNING,
        admit_strategy=dynamicemb.FrequencyAdmissionStrategy(3, initializer_args=arguments),
        admission_counter=dynamicemb.KVCounter(100),
        evicted_item_mode=dynamicemb.EvictedItemMode.RETAIN_KEY,
    )
    constraints: dict[str, Any] = {
        "a": DynamicTableConstraints(options, sharding_types=["row_wise"]),
        "b": dynamicemb.DynamicEmbParameterConstraints(
            sharding_types=["row_wise"], use_dynamicemb=True, dynamicemb_options=other
        ),
    }
    topology = machine()

    def planner() -> DynamicEmbeddingShardingPlanner:
        return DynamicEmbeddingShardingPlanner(
            topology=topology, constraints=constraints, storage_reservation=nothing_reserved()
        )

    plan = planner().plan(bags(a=500, b=500), sharders(optimizer=td.Adam(lr=0.25)))
    return {
        "constraints": constraints,
        "plan": plan,
        "sharders": sharders(optimizer=td.Adam(lr=0.25)),
        "enumerator": DynamicEmbeddingEnumerator(topology, 512, constraints),
        "estimators": [
            kind(topology, constraints) for kind in (DynamicPerfEstimator, DynamicStorageEstimator)
        ],
        "load planner": LoadPlanner(),
        "planner": planner(),
        "rows": td.RowBatch(
            torch.arange(2),
            torch.ones(2, 4),
            {"sum": torch.ones(2, 1)},
            {"step": torch.ones(2)},
        ),
    }


def results() -> dict[str, Any]:
    """Results of moves between ranks, which a job may keep or send."""
    return {
        "sync": SyncStats(ids=5, removed=1, evicted=2, sent_bytes=640),
        "reshard": {"a": ReshardedTable(ids=9, evicted=3, bytes=720)},
    }


def arguments() -> dict[str, Any]:
    """Arguments with DynamicEmb's names that values() lacks."""
    return {
        "optimizer": dynamicemb.DynamicEmbOptimType.FTRL,
        "admission": dynamicemb.ProbabilisticAdmissionStrategy(0.25),
        "counted": dynamicemb.FrequencyAdmissionStrategy(3, dynamicemb.KVCounter(100)),
    }


def expected() -> list[dict[str, Tensor]]:
    """By rank: what it had when the checkpoint was written."""
    numbers: list[dict[str, Tensor]] = kept("dcp_numbers.pt.gz", weights_only=True)
    return numbers


def write() -> None:
    """Writes all files."""
    ranks = Ranks(2)
    try:
        keep(ranks.run(save, str(DCP)), "dcp_numbers.pt.gz")
    finally:
        ranks.stop()
    keep(values(), "torchrec_values.pickle.gz")
    keep(results(), "torchrec_results.pickle.gz")
    keep(arguments(), "dynamicemb_arguments.pickle.gz")


if __name__ == "__main__":
    import saved_shards  # a rank calls functions of a module by its name

    saved_shards.write()
