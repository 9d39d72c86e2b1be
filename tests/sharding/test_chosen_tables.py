"""Tables that a sharder makes dynamic by its ``tables=``, with its ``options=``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from chosen_steps import OPTIONS, refused_plans, trained_ways
from planner_cases import bags, machine, nothing_reserved, sequences
from ranks import Ranks
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.types import KeyValueParams
from torchrec.modules.embedding_tower import EmbeddingTower

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicEmbeddingShardingPlanner,
    DynamicTableConstraints,
    TableOptions,
    dynamic_enumerator,
)
from torch_dynemb.torchrec.dynamicemb import DynamicEmbParameterConstraints
from torch_dynemb.torchrec.planning.estimators import shard_bytes
from torch_dynemb.torchrec.planning.options import planned_options

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

BAGS, SEQUENCES = DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder


class Both(nn.Module):
    """Collections of two classes; table ``a`` is in both."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.sequences = bags(a=10, b=10), sequences(a=10, c=10)


def planned(
    module: nn.Module, sharders: list[Any], constraints: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The plan of all tables, by module and name."""
    planner = DynamicEmbeddingShardingPlanner(
        topology=machine(),
        storage_reservation=nothing_reserved(),
        constraints=constraints,
        debug=False,
    )
    plan = planner.plan(module, sharders).plan
    return {
        f"{path}.{name}" if path else name: of
        for path, tables in plan.items()
        for name, of in tables.items()
    }


def dynamic(plan: dict[str, Any]) -> set[str]:
    return {name for name, of in plan.items() if of.compute_kernel == "customized_kernel"}


def check_ways(found_by_rank: list[Any]) -> None:
    for found in found_by_rank:
        expected, lying = found.pop("constraints")
        assert "bags.users" in {shard.table for shard in expected}
        assert lying["users"][1:] == ("row_wise", [0, 1])
        assert {name: kernel for name, (kernel, *_) in lying.items() if name in OPTIONS} == (
            dict.fromkeys(OPTIONS, "customized_kernel")
        )
        for way, (shards, places) in found.items():
            assert places == lying, way
            for shard, other in zip(shards, expected, strict=True):
                assert shard[:2] == other[:2], way  # table and first column
                torch.testing.assert_close(shard[2:], other[2:], rtol=0, atol=0, msg=way)


def test_training_equals_that_of_constraints(two_ranks: Ranks) -> None:
    check_ways(two_ranks.run(trained_ways))


def test_all_ranks_raise_where_plan_and_choice_differ(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(refused_plans)
    assert first.keys() == second.keys()
    for raised in (first, second):
        assert raised["static"] == (
            "ValueError: EmbeddingBagCollection: the sharder's tables or options name ['users'], "
            "which the plan makes static: plan with DynamicEmbeddingShardingPlanner and tables= of "
            "the sharder, or give them compute_kernel='customized_kernel' in a plan of your own, "
            "and give the plan to DistributedModelParallel"
        )
        assert "the plan makes table 'users' dynamic, but has no options" in raised["no options"]
        assert raised["one rank"] == "KeyError: 'no options of users'"
        assert "options.padding_idx differs between ranks: 0 on ran" in raised["other options"]


# -- choosing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ("all", {"a", "b"}),
        (["b"], {"b"}),
        ((), set()),
        ({"a"}, {"a"}),
        (lambda config: config.num_embeddings > 100, {"a"}),
        (None, set()),
    ],
)
def test_tables_are_chosen(tables: Any, expected: set[str]) -> None:
    module = bags(a=1000, b=10)
    plan = planned(module, [BAGS(tables=tables)])
    assert dynamic(plan) == expected
    # the sharder has the options
    assert [planned_options(of) for of in plan.values()] == [None, None]


def test_estimates_take_the_options_of_the_sharder() -> None:
    def sizes(options: Any, constraints: dict[str, Any] | None = None) -> list[int]:
        sharder = BAGS(tables="all", options=options)
        found = dynamic_enumerator(machine(), constraints).enumerate(bags(a=10, b=20), [sharder])
        of_tables = {of.name: shard_bytes(of) for of in found if of.sharding_type == "table_wise"}
        return [of_tables["a"][0], of_tables["b"][0]]

    def of(capacity: int) -> TableOptions:
        return TableOptions(policy=td.Policy(capacity=capacity, on_full="grow", score="none"))

    def expected(*ids: int) -> list[int]:  # rows, their generations, slots of the index
        return [n * (16 * 4 + 4) + math.ceil(n * 16 / 0.7) for n in ids]

    assert sizes(None) == expected(10, 20)  # num_embeddings
    assert sizes(of(1000)) == expected(1000, 1000)
    assert sizes({"b": of(1000)}) == expected(10, 1000)
    assert sizes(lambda config: of(7 * config.num_embeddings)) == expected(70, 140)
    assert sizes(of(1000), {"a": DynamicTableConstraints(of(100))}) == expected(100, 1000)


def test_other_constraints_of_a_chosen_table_apply() -> None:
    constraints = {"a": ParameterConstraints(sharding_types=["column_wise"], min_partition=8)}
    plan = planned(bags(a=10, b=10), [BAGS(tables="all")], constraints)
    assert dynamic(plan) == {"a", "b"}
    assert plan["a"].sharding_type == "column_wise"
    assert constraints["a"].compute_kernels is None  # constraints stay as they were given


def test_options_of_constraints_replace_those_of_the_sharder() -> None:
    own = TableOptions(padding_idx=5)
    plan = planned(
        bags(a=10, b=10),
        [BAGS(tables="all", options=TableOptions(padding_idx=1))],
        {"a": DynamicTableConstraints(own)},
    )
    assert dynamic(plan) == {"a", "b"}
    assert planned_options(plan["a"]) is own
    assert planned_options(plan["b"]) is None


def test_another_planning_chooses_anew() -> None:
    enumerator = dynamic_enumerator(machine())
    for tables in (["a"], ["b"], "all", []):
        module = bags(a=10, b=10)
        found = enumerator.enumerate(module, [BAGS(tables=tables)])
        chosen = {of.name for of in found if of.compute_kernel == "customized_kernel"}
        assert (
            chosen == enumerator.dynamic_tables() == ({"a", "b"} if tables == "all" else {*tables})
        )


def test_names_may_be_given_to_both_sharders() -> None:
    names = ["a", "b", "c"]
    plan = planned(Both(), [BAGS(tables=names), SEQUENCES(tables=names)])
    assert dynamic(plan) == {"bags.a", "bags.b", "sequences.a", "sequences.c"}


# -- refusals --------------------------------------------------------------------------------------

FUSED = ParameterConstraints(compute_kernels=["fused"])
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unknown": (
        {"tables": ["bb"]},
        {},
        "DynamicEmbeddingBagCollectionSharder: tables has 'bb', but the tables of its modules are "
        "['a', 'b']. Did you mean 'b'?",
    ),
    "unknown option": (
        {"tables": "all", "options": {"x": TableOptions()}},
        {},
        "DynamicEmbeddingBagCollectionSharder: options has 'x', but the tables of its modules are "
        "['a', 'b']",
    ),
    "kernel": (
        {"tables": ["a"]},
        {"a": FUSED},
        "DynamicEmbeddingEnumerator: constraints of table 'a' have compute_kernels ['fused'], but "
        "its sharder's tables makes it dynamic: remove compute_kernels, or leave the table out of "
        "tables",
    ),
    "key values": (
        {"tables": ["a"]},
        {"a": ParameterConstraints(key_value_params=KeyValueParams(l2_cache_size=3))},
        "have key_value_params KeyValueParams(",
    ),
    "static in DynamicEmb's words": (
        {"tables": ["a"]},
        {"a": DynamicEmbParameterConstraints()},
        "DynamicEmbeddingEnumerator: constraints of table 'a' are a DynamicEmbParameterConstraints "
        "of a static table, but its sharder's tables makes it dynamic",
    ),
    "data_parallel": (
        {"tables": ["a"]},
        {"a": ParameterConstraints(sharding_types=["data_parallel"])},
        "sharding_types of table 'a' is ['data_parallel']: data_parallel would replicate",
    ),
    "function of tables": (
        {"tables": lambda config: config.name},
        {},
        "DynamicEmbeddingBagCollectionSharder: tables has returned 'a' for table 'a', expected "
        "True or False",
    ),
    "function of options": (
        {"tables": ["a"], "options": lambda config: None},
        {},
        "DynamicEmbeddingBagCollectionSharder: options has returned None for table 'a', expected "
        "TableOptions(...)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plans_are_refused(case: str) -> None:
    arguments, constraints, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError)) as raised:
        planned(bags(a=10, b=10), [BAGS(**arguments)], constraints)
    assert message in str(raised.value)


def test_sharders_that_need_row_numbers_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="tables=, but ManagedCollisionEmbeddingBagColle"):
        planned(bags(a=10), [ManagedCollisionEmbeddingBagCollectionSharder(BAGS(tables="all"))])
    tower = EmbeddingTower(bags(a=10), nn.Linear(16, 1))
    constraints = {"a": DynamicTableConstraints(TableOptions())}
    with pytest.raises(ValueError, match="and leave the sharder of a module around it out"):
        planned(tower, [EmbeddingTowerSharder(), BAGS()], constraints)
    assert dynamic(planned(tower, [BAGS()], constraints)) == {"embedding.a"}


def test_a_collection_under_two_names(one_rank: None) -> None:
    shared = bags(a=10)
    with pytest.raises(ValueError, match="children 'p' and 'q' of module '' are one module with d"):
        planned(nn.ModuleDict({"p": shared, "q": shared}), [BAGS(tables="all")])
    model, sharders = nn.ModuleDict({"p": shared, "q": nn.Sequential(shared)}), [BAGS(tables="all")]
    plan = DynamicEmbeddingShardingPlanner(
        topology=machine(1), storage_reservation=nothing_reserved(), debug=False
    ).plan(model, sharders)
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    assert sharded.module["q"][0] is sharded.module["p"]


def test_plans_of_two_collections_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tables has 'c', but that table is in a module of anoth"):
        planned(Both(), [BAGS(tables=["c"]), SEQUENCES()])
    with pytest.raises(ValueError, match=r"'a' is chosen by the sharder of module 'bags', but not"):
        planned(Both(), [BAGS(tables=["a"]), EmbeddingCollectionSharder()])
    with pytest.raises(ValueError, match=r"'a' is chosen by the sharder of module 'sequences', bu"):
        planned(Both(), [BAGS(), SEQUENCES(tables="all")])


@pytest.mark.parametrize("sharder", [BAGS, SEQUENCES])
def test_arguments_are_refused(sharder: Any) -> None:
    expected = "expected 'all', a list of table names, or a function of a table's config"
    for tables, message in (
        ("users", rf"tables is 'users', {expected}: for one table \['users'\]"),
        (3, f"tables is 3, {expected}"),
        (
            {"a": 3},
            rf"tables is {{'a': 3}}, {expected}: options= takes a dict of TableOptions by name",
        ),
        ([b"users"], rf"tables is \[b'users'\], {expected}"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{sharder.__name__}: {message}$"):
            sharder(tables=tables)
    with pytest.raises(TypeError, match=r"options is 3, expected TableOptions\(...\), a dict: Ta"):
        sharder(tables="all", options=3)


def test_planners_of_torchrec_are_refused_or_take_the_enumerator(one_rank: None) -> None:
    message = r"cannot price these: plan with DynamicEmbeddingShardingPlanner\(\).*dynamic_enumer"
    with pytest.raises(ValueError, match=message):
        DistributedModelParallel(bags(a=10), sharders=[BAGS(tables="all")])
    topology = machine(1)
    planner = EmbeddingShardingPlanner(
        topology,
        enumerator=dynamic_enumerator(topology),
        storage_reservation=nothing_reserved(),
        debug=False,
    )
    [of_module] = planner.plan(bags(a=10), [BAGS(tables="all")]).plan.values()
    assert dynamic(of_module) == {"a"}
