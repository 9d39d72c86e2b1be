"""What the ranks of test_chosen_tables do: they train tables chosen in different ways."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from planner_cases import machine, nothing_reserved
from sharded_models import Model, Table
from table_rows_steps import Shard, error_of, shards_of, train
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.types import ShardingPlan

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicEmbeddingShardingPlanner,
    DynamicTableConstraints,
    TableOptions,
    dynamic_enumerator,
)

TABLES = (
    Table("users", 8, ("a",), "mean", num_embeddings=1000),
    Table("days", 8, ("b",), "sum", dynamic=False),
    Table("words", 8, ("a", "b"), "none", num_embeddings=1000),
)
LATEST = td.Policy(score="frequency", capacity=10)
OPTIONS = {
    "users": TableOptions(initializer=td.Normal(), policy=LATEST),
    "words": TableOptions(initializer=td.Normal(), padding_idx=3),
}


def sharders(bags: dict[str, Any], sequences: dict[str, Any]) -> list[Any]:
    adam = td.Adam(lr=0.1)
    return [
        DynamicEmbeddingBagCollectionSharder(optimizer=adam, **bags),
        DynamicEmbeddingCollectionSharder(optimizer=adam, **sequences),
    ]


def planned(
    model: Any, with_sharders: list[Any], constraints: dict[str, Any], stock: bool = False
) -> ShardingPlan:
    """The plan of the package's planner, or of TorchRec's with the package's enumerator."""
    options: dict[str, Any] = {
        "topology": machine(),
        "storage_reservation": nothing_reserved(),
        "constraints": constraints,
        "debug": False,
    }
    if not stock:
        planner = DynamicEmbeddingShardingPlanner(**options)
        return planner.collective_plan(model, with_sharders, dist.group.WORLD)
    enumerator = dynamic_enumerator(options["topology"], constraints)
    plan = EmbeddingShardingPlanner(**options, enumerator=enumerator).collective_plan(
        model, with_sharders, dist.group.WORLD
    )
    assert isinstance(plan, ShardingPlan)
    return plan


TYPES = {"users": ["row_wise"], "days": ["table_wise"], "words": ["row_wise", "table_wise"]}
PLAIN = {name: ParameterConstraints(sharding_types=types) for name, types in TYPES.items()}
DYNAMIC = {
    name: DynamicTableConstraints(options, sharding_types=TYPES[name])
    for name, options in OPTIONS.items()
}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "constraints": (DYNAMIC, {}, {}),
    "names and a dict": (
        {},
        {"tables": ["users"], "options": OPTIONS},
        {"tables": "all", "options": OPTIONS},
    ),
    "functions": (
        {},
        {"tables": lambda of: of.num_embeddings > 100, "options": lambda of: OPTIONS[of.name]},
        {"tables": lambda of: True, "options": OPTIONS["words"]},
    ),
    "both": (
        {"users": DYNAMIC["users"]},
        {"tables": ("users",), "options": TableOptions(padding_idx=7)},
        {"tables": "all", "options": OPTIONS["words"]},
    ),
}


def trained_ways(rank: int) -> dict[str, tuple[list[Shard], dict[str, tuple[str, str, Any]]]]:
    """What this rank has after training, and where tables lie, by the way of choosing them."""
    found = {}
    for way, (constraints, bags, sequences) in WAYS.items():
        torch.manual_seed(0)
        model = Model(TABLES, weighted=False)
        of_model = sharders(bags, sequences)
        plan = planned(model, of_model, {**PLAIN, **constraints}, stock=way == "functions")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".* the plan makes no table")
            parallel = DistributedModelParallel(
                model, device=torch.device("cpu"), plan=plan, sharders=of_model
            )
        train(rank, parallel, TABLES, range(3))
        lying = {
            table: (of.compute_kernel, of.sharding_type, of.ranks)
            for module in plan.plan.values()
            for table, of in module.items()
        }
        found[way] = list(shards_of(parallel)), lying
    return found


def refused_plans(rank: int) -> dict[str, str]:
    """What all ranks raise where a plan, and what the sharder chooses, do not go together."""
    plain = sharders({}, {})
    static = planned(Model(TABLES, weighted=False), plain, {})
    dynamic = planned(
        Model(TABLES, weighted=False), sharders({"tables": ["users"]}, {"tables": "all"}), PLAIN
    )

    def sharded(plan: ShardingPlan, with_sharders: Sequence[Any]) -> str:
        return error_of(
            lambda: DistributedModelParallel(
                Model(TABLES, weighted=False),
                device=torch.device("cpu"),
                plan=plan,
                sharders=list(with_sharders),
            )
        )

    def failing(config: Any) -> TableOptions:
        if rank == 1:
            raise KeyError(f"no options of {config.name}")
        return TableOptions()

    return {
        "static": sharded(static, sharders({"tables": ["users"]}, {})),
        "no options": sharded(dynamic, sharders({}, {})),
        "one rank": sharded(dynamic, sharders({"tables": "all", "options": failing}, {})),
        "other options": sharded(
            dynamic,
            sharders({"tables": "all", "options": TableOptions(padding_idx=rank)}, {}),
        ),
    }
