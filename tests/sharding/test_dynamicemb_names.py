"""DynamicEmb's options: each is translated or raises; those without effect warn."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoint_content import saved_content
from checkpoint_models import START, Kind
from checkpoint_steps import dump_and_save
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from planner_cases import bags, machine, nothing_reserved, sharders
from ranks import Ranks
from torchrec import DataType, EmbeddingBagCollection
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

import torch_dynemb as td
from torch_dynemb.compat.dynamicemb import get_table_value_bytes
from torch_dynemb.compat.dynamicemb.incremental_dump import incremental_dump
from torch_dynemb.torchrec import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicStorageEstimator,
)
from torch_dynemb.torchrec.dynamicemb import options as names
from torch_dynemb.torchrec.dynamicemb.options import (
    DynamicEmbCheckMode,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbParameterConstraints,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EvictedItemMode,
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilisticAdmissionStrategy,
)
from torch_dynemb.torchrec.planning.options import (
    TableOptions,
    constrained_options,
    planned_options,
)

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

Mode = DynamicEmbInitializerMode
Strategy = DynamicEmbScoreStrategy


def counted(*drawn: Any, **given: Any) -> FrequencyAdmissionStrategy:
    arguments = DynamicEmbInitializerArgs(*drawn, **given)
    return FrequencyAdmissionStrategy(3, initializer_args=arguments)


# A value of each field and what of ours it becomes, for a table of 10,000 rows of 8 columns.
ARRIVES: dict[str, list[tuple[Any, str, Any]]] = {
    "initializer_args": [
        (DynamicEmbInitializerArgs(), "initializer", td.Uniform(-0.01, 0.01)),
        (DynamicEmbInitializerArgs(Mode.UNIFORM, upper=0.5), "initializer", td.Uniform(-0.01, 0.5)),
        (DynamicEmbInitializerArgs(Mode.UNIFORM, lower=0.0), "initializer", td.Uniform(0.0, 0.01)),
        (DynamicEmbInitializerArgs(Mode.NORMAL), "initializer", td.Normal(0.0, 1.0)),
        (DynamicEmbInitializerArgs(Mode.NORMAL, 1.0, 0.5), "initializer", td.Normal(1.0, 0.5)),
        (DynamicEmbInitializerArgs(Mode.CONSTANT, value=2.0), "initializer", td.Constant(2.0)),
        (
            DynamicEmbInitializerArgs(Mode.TRUNCATED_NORMAL, 0.1, 0.2, -0.5, 0.6),
            "initializer",
            td.TruncatedNormal(0.1, 0.2, -0.5, 0.6),
        ),
        (
            DynamicEmbInitializerArgs(Mode.TRUNCATED_NORMAL),
            "initializer",
            td.TruncatedNormal(0.0, 1.0, -0.01, 0.01),
        ),
        (
            DynamicEmbInitializerArgs(Mode.TRUNCATED_NORMAL, upper=1.0),
            "initializer",
            td.TruncatedNormal(0.0, 1.0, -0.01, 1.0),
        ),
    ],
    "eval_initializer_args": [
        (DynamicEmbInitializerArgs(Mode.CONSTANT), "eval_default", "zeros"),
        (
            DynamicEmbInitializerArgs(Mode.CONSTANT, value=2.0),
            "eval_default",
            torch.full((8,), 2.0),
        ),
        (DynamicEmbInitializerArgs(Mode.NORMAL), "eval_default", td.Normal(0.0, 1.0)),
        (DynamicEmbInitializerArgs(), "eval_default", td.Uniform(-0.01, 0.01)),
    ],
    "training": [
        (True, "trainable", True),
        (False, "trainable", False),
        (False, "policy.admission", td.AdmitNone()),
    ],
    "score_strategy": [
        (Strategy.TIMESTAMP, "policy.scores", ("timestamp",)),
        (Strategy.STEP, "policy.scores", ("step",)),
        (Strategy.CUSTOMIZED, "policy.scores", ("custom",)),
        (Strategy.LFU, "policy.scores", ("frequency",)),
        ((Strategy.LFU,), "policy.scores", ("frequency",)),
        ((Strategy.TIMESTAMP, Strategy.LFU), "policy.scores", ("frequency", "timestamp")),
        ((Strategy.LFU, Strategy.TIMESTAMP), "policy.scores", ("frequency", "timestamp")),
        ((Strategy.STEP, Strategy.LFU), "policy.scores", ("step", "frequency")),
        ((Strategy.LFU, Strategy.STEP), "policy.scores", ("frequency", "step")),
        ((Strategy.TIMESTAMP, Strategy.STEP), "policy.scores", ("step", "timestamp")),
        ((Strategy.CUSTOMIZED, Strategy.TIMESTAMP), "policy.scores", ("custom", "timestamp")),
        ((Strategy.STEP, Strategy.LFU), "policy.on_full", "evict"),
        ((Strategy.TIMESTAMP, Strategy.NO_EVICTION), "policy.scores", ("timestamp",)),
        ((Strategy.TIMESTAMP, Strategy.NO_EVICTION), "policy.on_full", "grow"),
        (None, "policy.scores", ("step",)),
        (None, "policy.on_full", "evict"),
        (Strategy.LFU, "policy.on_full", "evict"),
        (Strategy.NO_EVICTION, "policy.scores", ("none",)),
        (Strategy.NO_EVICTION, "policy.on_full", "grow"),
        (Strategy.NO_EVICTION, "policy.capacity", 10_000),
    ],
    "safe_check_mode": [
        (DynamicEmbCheckMode.ERROR, "policy.check", "error"),
        (DynamicEmbCheckMode.WARNING, "policy.check", "warning"),
        (DynamicEmbCheckMode.IGNORE, "policy.check", "ignore"),
    ],
    "admit_strategy": [
        (None, "policy.refused", "zeros"),
        (FrequencyAdmissionStrategy(3), "policy.admission", td.AdmitFrequent(3)),
        (FrequencyAdmissionStrategy(3), "policy.refused", "initial"),
        (FrequencyAdmissionStrategy(1), "policy.admission", None),
        (FrequencyAdmissionStrategy(0), "policy.admission", None),
        (counted(Mode.CONSTANT), "policy.refused", "zeros"),
        (counted(Mode.CONSTANT, value=0.5), "policy.refused", torch.full((8,), 0.5)),
        (counted(), "policy.refused", "initial"),  # as new rows
        (counted(Mode.NORMAL, 0.0, 0.1), "policy.refused", td.Normal(0.0, 0.1)),
        (ProbabilisticAdmissionStrategy(0.25), "policy.admission", td.AdmitByChance(0.25)),
        (ProbabilisticAdmissionStrategy(0.25), "policy.refused", "initial"),
        (ProbabilisticAdmissionStrategy(1), "policy.admission", None),
        (ProbabilisticAdmissionStrategy(0), "policy.admission", td.AdmitNone()),
        (
            ProbabilisticAdmissionStrategy(0.25, DynamicEmbInitializerArgs(Mode.CONSTANT)),
            "policy.refused",
            "zeros",
        ),
    ],
}

STORE = td.SSDStore("rows", cache="10 rows")
ARRIVES["evicted_item_mode"] = [
    (EvictedItemMode.RETAIN_KEY, "record_evicted", True),
    (EvictedItemMode.DISCARD, "record_evicted", False),
]
ARRIVES["external_storage"] = [(STORE, "storage", STORE), (None, "storage", None)]

# Values that are refused, and what the error says.
RAISES: dict[str, list[tuple[Any, str]]] = {
    "evict_strategy": [("LFU", "evict_strategy is 'LFU'.*score_strategy")],
    "local_hbm_for_values": [(5, "local_hbm_for_values is 5.*leave it out")],
    "device_id": [(1, "device_id is 1.*device of its rank")],
    "training": [(None, "training is None, expected True or False")],
    "caching": [
        (True, "caching is True, but global_hbm_for_values is 0"),
        (1, "caching is 1, expected True or False"),
    ],
    "external_storage": [("ps", "external_storage is 'ps', expected HostStore, SSDStore")],
    "score_function": [(max, "score_function is .*LFU_DECAY and half_life='7d'")],
    "evicted_item_mode": [("RETAIN_KEY", "evicted_item_mode is 'RETAIN_KEY', expected Evicted")],
    "half_life": [
        ("7d", "half_life is '7d' and score_strategy is .*LFU_DECAY needs"),
    ],
    "embedding_dtype": [
        (torch.int8, "embedding_dtype is torch.int8, expected one of"),
        (torch.float8_e4m3fn, "embedding_dtype is torch.float8_e4m3fn.*DataType.BF16"),
    ],
    "index_type": [(torch.int32, "index_type is torch.int32, expected one of")],
    "dist_type": [("diagonal", "dist_type is 'diagonal', expected one of")],
    "safe_check_mode": [("loud", "safe_check_mode is 'loud', expected one of")],
    "initializer_args": [("normal", "initializer_args is 'normal', expected")],
    "eval_initializer_args": [
        (0.0, "eval_initializer_args is 0.0, expected"),
    ],
    "score_strategy": [
        ((Strategy.LFU, Strategy.LFU), "score_strategy is .*each once"),
        ((Strategy.LFU, "step"), "score_strategy is .*expected a DynamicEmbScoreStrategy"),
        ("lfu", "score_strategy is 'lfu', expected"),
        (Strategy.LFU_DECAY, "half_life is None and score_strategy is .*needs a half-life"),
        ((), "score_strategy is"),
    ],
    "admit_strategy": [
        (3, "admit_strategy is 3, expected"),
    ],
    "admission_counter": [
        (KVCounter(10), "admission_counter is KVCounter.*admit_strategy is None, expected Freq"),
        (10, "admission_counter is 10, expected"),
    ],
}

# Values without effect: a warning says what happens instead.
WARNS: dict[str, tuple[Any, str]] = {
    "init_capacity": (100, "init_capacity is 100.*as ids arrive"),
    "max_load_factor": (0.75, "max_load_factor is 0.75.*70 % full"),
    "dist_type": ("continuous", "dist_type is 'continuous'.*a hash assigns"),
    "admission_counter": (KVCounter(10), "admission_counter.*23 bytes.*AdmitFrequentSketch"),
    "admit_strategy": (
        FrequencyAdmissionStrategy(2, KVCounter(10)),
        "admit_strategy.counter is KVCounter.*23 bytes.*AdmitFrequentSketch",
    ),
    "output_dist": ("hierarchical", "output_dist is 'hierarchical'.*TorchRec's collectives"),
    "output_dist_capacity": (4096, "output_dist_capacity is 4096.*TorchRec's collectives"),
}

# Values that need the table to be judged: see the tests below.
WITH_TABLE = {
    "bucket_capacity",
    "dim",
    "embedding_dtype",
    "global_hbm_for_values",
    "max_capacity",
}


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no warning had been given in this process, and all others were errors."""
    monkeypatch.setattr(names, "_warned", set())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="DynamicEmb")
        yield


def translated(**options: Any) -> TableOptions:
    return DynamicEmbTableOptions(**options).table_options(num_embeddings=10_000, embedding_dim=8)


def test_every_field_is_translated_or_refused() -> None:
    known = ARRIVES.keys() | RAISES.keys() | WARNS.keys() | WITH_TABLE
    assert known == {field.name for field in fields(DynamicEmbTableOptions)}


@pytest.mark.parametrize(
    ("name", "value", "ours", "expected"),
    [(name, *case) for name, cases in ARRIVES.items() for case in cases],
)
def test_what_arrives(name: str, value: Any, ours: str, expected: Any) -> None:
    found: Any = translated(**{name: value})
    for part in ours.split("."):
        found = getattr(found, part)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [(name, *case) for name, cases in RAISES.items() for case in cases],
)
def test_what_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=message):
        DynamicEmbTableOptions(**{name: value})


@pytest.mark.parametrize("name", WARNS)
def test_options_without_effect_warn_once(name: str) -> None:
    value, message = WARNS[name]
    options = {name: value}
    if name == "admission_counter":
        options["admit_strategy"] = FrequencyAdmissionStrategy(2)
    with pytest.warns(UserWarning, match=message):
        DynamicEmbTableOptions(**options)
    DynamicEmbTableOptions(**options)  # another warning would be an error


def test_defaults_are_those_of_dynamicemb() -> None:
    options = translated()
    assert options.initializer == td.Uniform(-0.01, 0.01)
    assert options.policy.description() == {
        "score": "timestamp",
        "capacity": 10_000,
        "on_full": "evict",
        "admission": None,
        "ttl": None,
    }
    assert (options.policy.check, options.policy.refused) == ("ignore", "zeros")
    assert (options.eval_default, options.padding_idx) == ("zeros", None)
    for routing in ("roundrobin", "hash_roundrobin"):
        DynamicEmbTableOptions(dist_type=routing, index_type=torch.int64)


def test_a_count_that_decays() -> None:
    strategy = (Strategy.TIMESTAMP, Strategy.LFU_DECAY)
    policy = translated(score_strategy=strategy, half_life="7d").policy
    assert policy.scores == ("decayed", "timestamp")
    assert policy.half_life_ticks == 7 * 86_400
    with pytest.raises(ValueError, match="half_life is 0, expected from 1"):
        translated(score_strategy=Strategy.LFU_DECAY, half_life=0)
    assert DynamicEmbTableOptions(
        score_strategy=Strategy.LFU_DECAY, half_life="7d"
    ) != DynamicEmbTableOptions(score_strategy=Strategy.LFU_DECAY, half_life="1d")


def test_options_can_be_set_and_are_checked_again() -> None:
    options = DynamicEmbTableOptions()
    options.score_strategy = Strategy.LFU
    options.initializer_args.mode = Mode.NORMAL
    options.admit_strategy = FrequencyAdmissionStrategy(3)
    options.admit_strategy.threshold = 5
    ours = options.table_options(num_embeddings=100, embedding_dim=8)
    assert ours.policy.scores == ("frequency",)
    assert ours.initializer == td.Normal(0.0, 1.0)
    assert ours.policy.admission == td.AdmitFrequent(5)

    def refused(kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            options.table_options(num_embeddings=100, embedding_dim=8)

    options.admit_strategy.threshold = -1
    refused(ValueError, "FrequencyAdmissionStrategy: threshold is -1, expected at least 0")
    options.admit_strategy = None
    options.initializer_args.mode = Mode.DEBUG
    refused(NotImplementedError, "DynamicEmbInitializerArgs: mode is DEBUG")
    options.initializer_args = DynamicEmbInitializerArgs()
    options.caching = True
    refused(ValueError, "caching is True, but global_hbm_for_values is 0")
    options.caching = False
    options.dim = 8  # for a table of 16 columns
    with pytest.raises(ValueError, match="'a': dim is 8"):
        DynamicEmbParameterConstraints(
            use_dynamicemb=True, dynamicemb_options=options
        ).options_of_table(bags(a=100).embedding_bag_configs()[0], td.SGD(lr=0.1))


def test_options_are_compared_by_what_groups_tables() -> None:
    one, other = DynamicEmbTableOptions(dim=8), DynamicEmbTableOptions(dim=16)
    assert list(one.get_grouped_key()) == [
        "training",
        "caching",
        "external_storage",
        "index_type",
        "dist_type",
        "score_strategy",
        "admit_strategy",
        "evicted_item_mode",
        "half_life",
        "initializer",
        "eval_initializer",
    ]
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1
    other.score_strategy = Strategy.LFU
    assert one != other
    assert hash(one) != hash(other)
    one.score_strategy = Strategy.LFU
    rejected = DynamicEmbInitializerArgs()
    one.admit_strategy = FrequencyAdmissionStrategy(3, KVCounter(10), rejected)
    other.admit_strategy = FrequencyAdmissionStrategy(3, KVCounter(99), copy.copy(rejected))
    assert one == other
    assert hash(one) == hash(other)
    assert one != 3
    assert DynamicEmbTableOptions(score_strategy=(Strategy.STEP,)).score_strategy == Strategy.STEP


def test_constraints_make_a_table_dynamic_or_not() -> None:
    constraints = DynamicEmbParameterConstraints(
        sharding_types=["row_wise"],
        use_dynamicemb=True,
        dynamicemb_options=DynamicEmbTableOptions(),
        pooling_factors=[7.0],
    )
    assert constrained_options(constraints) is not None
    assert constraints.compute_kernels == ["customized_kernel"]
    assert (constraints.sharding_types, constraints.pooling_factors) == (["row_wise"], [7.0])
    read = pickle.loads(pickle.dumps(constraints))
    assert isinstance(read.dynamicemb_options, DynamicEmbTableOptions)
    assert hash(copy.deepcopy(constraints)) == hash(constraints) == hash(read)

    static = DynamicEmbParameterConstraints(compute_kernels=["fused"])
    assert constrained_options(static) is None
    assert static.compute_kernels == ["fused"]
    assert isinstance(static, ParameterConstraints)

    static.compute_kernels = None
    static.use_dynamicemb = True
    assert constrained_options(static) is not None
    assert static.compute_kernels == ["customized_kernel"]
    static.use_dynamicemb = False
    assert constrained_options(static) is None
    assert static.compute_kernels is None
    constraints.dynamicemb_options = TableOptions()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="table 'a': dynamicemb_options is TableOptions"):
        constraints.options_of_table(bags(a=9).embedding_bag_configs()[0], td.SGD(lr=0.1))

    with_kernel = DynamicEmbParameterConstraints(
        use_dynamicemb=True,
        compute_kernels=["customized_kernel"],
        dynamicemb_options=DynamicEmbTableOptions(max_capacity=9),
    )
    config = bags(a=9).embedding_bag_configs()[0]
    planned = with_kernel.options_of_table(config, td.SGD(lr=0.1))
    assert planned.policy.capacity == 128  # one bucket
    with pytest.raises(ValueError, match=r"max_capacity is 9, .*num_embeddings=8: set num_emb"):
        with_kernel.options_of_table(bags(a=8).embedding_bag_configs()[0], td.SGD(lr=0.1))
    with pytest.raises(ValueError, match=r"compute_kernels is \['fused'\].*leave it out"):
        DynamicEmbParameterConstraints(use_dynamicemb=True, compute_kernels=["fused"])
    with pytest.raises(TypeError, match=r"dynamicemb_options is .*DynamicTableConstraints"):
        DynamicEmbParameterConstraints(
            use_dynamicemb=True,
            dynamicemb_options=TableOptions(),  # type: ignore[arg-type]
        )


def plan_of(module: EmbeddingBagCollection, **options: Any) -> Any:
    """As DynamicEmb's users plan; the table is ``a``."""
    constraints = {
        "a": DynamicEmbParameterConstraints(
            sharding_types=["row_wise"],
            use_dynamicemb=True,
            dynamicemb_options=DynamicEmbTableOptions(**options),
        ),
        "b": DynamicEmbParameterConstraints(),
    }
    topology = machine()
    planner = DynamicEmbeddingShardingPlanner(
        eb_configs=module.embedding_bag_configs(),
        topology=topology,
        constraints=constraints,
        batch_size=64,
        enumerator=DynamicEmbeddingEnumerator(topology=topology, constraints=constraints),
        storage_reservation=nothing_reserved(),
        debug=False,
    )
    return planner.plan(module, sharders(EmbOptimType.ADAM)).plan[""]


def test_a_plan_knows_the_capacity_and_bounds_of_the_config() -> None:
    plan = plan_of(bags(a=10_000, b=10), score_strategy=Strategy.LFU)
    options = planned_options(plan["a"])
    assert options is not None
    assert options.policy.capacity == 10_112  # 79 buckets of 128
    assert options.policy.scores == ("frequency",)
    assert options.initializer == td.Uniform(-0.01, 0.01)
    assert plan["a"].sharding_type == "row_wise"
    assert planned_options(plan["b"]) is None


def test_ranks_have_as_many_rows_as_in_dynamicemb(one_rank: None) -> None:
    config = bags(a=1000).embedding_bag_configs()[0]

    def capacity(**options: Any) -> int | None:
        constraints = DynamicEmbParameterConstraints(
            use_dynamicemb=True, dynamicemb_options=DynamicEmbTableOptions(**options)
        )
        return constraints.options_of_table(config, td.SGD(lr=0.1)).policy.capacity

    assert capacity() == 1024
    assert capacity(bucket_capacity=1024) == 1024
    assert capacity(bucket_capacity=16, score_strategy=Strategy.NO_EVICTION) == 1008
    with mock.patch("torch_dynemb.torchrec.dynamicemb.options.default_group") as group:
        group.return_value.size.return_value = 16
        assert capacity() == 16 * 128
    with pytest.raises(ValueError, match="bucket_capacity is 100, expected a multiple of"):
        capacity(bucket_capacity=100)


def test_an_enumerator_that_does_not_look_at_configs_is_refused() -> None:
    constraints = {"a": DynamicEmbParameterConstraints(use_dynamicemb=True)}
    estimators = [DynamicStorageEstimator(machine(), constraints)]
    enumerator = EmbeddingEnumerator(machine(), 64, constraints, estimators)
    with pytest.raises(ValueError, match=r"'a'.*plan with a DynamicEmbeddingEnumerator"):
        enumerator.enumerate(bags(a=100), sharders())


def test_dim_and_dtype_must_be_those_of_the_config() -> None:
    plan_of(bags(a=100, b=10), dim=16, embedding_dtype=torch.float32)
    plan_of(bags(DataType.BF16, a=100, b=10), embedding_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"'a': dim is 8.*embedding_dim=16"):
        plan_of(bags(a=100, b=10), dim=8)
    with pytest.raises(ValueError, match=r"'a': embedding_dtype is torch.bfloat16.*DataType.BF16"):
        plan_of(bags(a=100, b=10), embedding_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"'a': embedding_dtype is torch.float32"):
        plan_of(bags(DataType.BF16, a=100, b=10), embedding_dtype=torch.float32)


def test_less_device_memory_than_all_rows_leaves_the_rest_on_the_host() -> None:
    module = bags(a=1000, b=10)
    config = module.embedding_bag_configs()[0]
    everything = get_table_value_bytes(config, EmbOptimType.ADAM, 2)
    assert everything == 2 * 512 * (16 + 2 * 16) * 4  # a rank's 500 rows are rounded to 4 x 128
    for given, storage in {
        0: None,
        everything: None,
        everything // 2: td.HostStore(hbm=everything // 2),  # of one rank
    }.items():
        options = planned_options(plan_of(module, global_hbm_for_values=given)["a"])
        assert options is not None
        assert options.storage == storage
    options = planned_options(plan_of(module, global_hbm_for_values=1 << 14, caching=True)["a"])
    assert options is not None
    assert options.storage == td.HostStore(cache=1 << 14)
    with pytest.raises(ValueError, match=r"global_hbm_for_values is \d+, less than .* leave one"):
        plan_of(module, global_hbm_for_values=everything // 2, external_storage=STORE)
    exactly = get_table_value_bytes(config, EmbOptimType.EXACT_ROWWISE_ADAGRAD, 1, 16)
    assert exactly == 1008 * 17 * 4


def test_default_bounds_follow_num_embeddings() -> None:
    for rows in (1, 50, 10**9):
        options = DynamicEmbTableOptions().table_options(num_embeddings=rows, embedding_dim=4)
        bound = math.sqrt(1 / rows)
        assert options.initializer == td.Uniform(-bound, bound)


def test_an_incremental_dump_has_the_ids_that_have_been_seen_since() -> None:
    tables = td.DynamicEmbeddingCollection(
        [
            td.TableConfig("seen", 4, policy=td.Policy(score="step")),
            td.TableConfig("counted", 4, policy=td.Policy(score="frequency")),
        ],
        optimizer=td.SGD(lr=0.1),
    )
    model = torch.nn.ModuleDict({"bags": tables})
    for step in range(3):
        ids = torch.arange(step, step + 3)
        sum(out.sum() for out in tables({"seen": ids, "counted": ids}).values()).backward()
        tables.optimizer.step()
    rows, scores = incremental_dump(model, 2)
    assert rows["model.bags"]["seen"][0].tolist() == [2, 3, 4]
    assert torch.equal(rows["model.bags"]["seen"][1], tables.group.read(0, torch.tensor([2, 3, 4])))
    assert rows["model.bags"]["counted"][0].tolist() == [1, 2, 3]
    assert scores == {"model.bags": {"seen": 3, "counted": 2}}
    rows, scores = incremental_dump(model, {"model.bags": {"seen": 3}})
    assert {path: list(of) for path, of in rows.items()} == {"model.bags": ["seen"]}
    assert rows["model.bags"]["seen"][1].shape == (0, 4)


def test_what_an_incremental_dump_cannot_give_is_refused() -> None:
    with pytest.warns(UserWarning, match="has no dynamic tables"):
        assert incremental_dump(torch.nn.Linear(1, 1), 7) is None
    plain = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
    with pytest.raises(ValueError, match=r"'embedding' keeps no scores.*DeltaLog"):
        incremental_dump(plain, 7)
    with pytest.raises(ValueError, match=r"names table 'other' of 'bags', but the model has"):
        incremental_dump(plain, {"bags": {"other": 1}})
    with pytest.raises(TypeError, match="score_threshold is '7'"):
        incremental_dump(plain, "7")
    with pytest.raises(ValueError, match="score_threshold is -1"):
        incremental_dump(plain, -1)
    with pytest.raises(TypeError, match="model is 3"):
        incremental_dump(3, 7)


def test_an_incremental_dump_of_a_sharded_model_is_of_all_ranks(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    shardings = ("row_wise", "table_wise", "column_wise")
    kinds = tuple(Kind(of, (of, of), "times") for of in shardings)
    threshold = START + 200  # when the last step began
    path = tmp_path / "saved"
    dumped = two_ranks.run(dump_and_save, kinds, str(path), threshold)
    saved = saved_content(path)
    for rows, scores in dumped:
        found = {
            f"{of.removeprefix('model.')}.{name}": rows[of][name]
            for of in rows
            for name in rows[of]
        }
        assert found.keys() == saved.keys()
        for name, content in saved.items():
            since = content.scores["timestamp"] >= threshold
            assert 0 < int(since.sum()) < since.numel()
            assert torch.equal(found[name][0], content.ids[since]), name
            assert torch.equal(found[name][1], content.rows[since]), name
        assert {score for of in scores.values() for score in of.values()} == {START + 300}
