"""Errors of sharding say what was given, what was expected and what to do."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    WeightDecayMode,
)
from planner_cases import bags
from ranks import Ranks
from record_dict import RecordDict
from refused_models import (
    batch_refusals,
    in_another_order,
    refusal,
    refusals,
    refused_by_the_second,
    sharder_refusals,
)
from sharded_models import Table, kernels, sharded
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    TableOptions,
)

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

TABLE = Table("users", 8, ("user",))
OPTIONS = TableOptions()
SHARDINGS = (
    "['table_wise', 'column_wise', 'table_column_wise', 'row_wise', 'table_row_wise', 'grid_shard']"
)
REFUSED: dict[str, tuple[Table, dict[str, Any], str]] = {
    "data_parallel": (
        replace(TABLE, sharding="data_parallel"),
        {},
        "ValueError: EmbeddingBagCollection: table 'users' is dynamic and data_parallel, which "
        f"would give every rank its own diverging copy: choose one of {SHARDINGS}, or leave the "
        "table static",
    ),
    "sharding_type_of_sequences": (
        replace(TABLE, sharding="table_row_wise", pooling="none"),
        {},
        "ValueError: EmbeddingCollection: table 'users' has sharding_type 'table_row_wise', "
        "expected one of ['table_wise', 'column_wise', 'row_wise']",
    ),
    "no_options": (
        TABLE,
        {"options": {}},
        "ValueError: EmbeddingBagCollection: the plan makes table 'users' dynamic, but has no "
        "options: give options=TableOptions(...) or options={'users': TableOptions(...)} to the "
        "sharder",
    ),
    "options_twice": (
        TABLE,
        {"options": {"users": OPTIONS}, "planned_options": {"users": OPTIONS}},
        "ValueError: EmbeddingBagCollection: table 'users' has options in the plan and in the "
        "sharder's options: give them once",
    ),
    "options_of_a_static_table": (
        replace(TABLE, dynamic=False),
        {"options": {"users": OPTIONS}},
        "ValueError: EmbeddingBagCollection: the sharder's tables or options name ['users'], which "
        "the plan makes static: plan with DynamicEmbeddingShardingPlanner and tables= of the "
        "sharder, or give them compute_kernel='customized_kernel' in a plan of your own, and give "
        "the plan to DistributedModelParallel",
    ),
    "unknown_fused_params": (
        TABLE,
        {"fused_params": {"cache_precision": 1, "learning_rate": 0.1}},
        "ValueError: EmbeddingBagCollection: table 'users': fused_params has ['cache_precision'], "
        "without a meaning for dynamic tables, expected some of ['beta1', 'beta2', 'betas', "
        "'eps', 'eta', 'ftrl_beta', 'gradient_clipping', 'initial_accumulator_value', 'l1_reg', "
        "'l2_reg', 'learning_rate', 'learning_rate_power', 'lr', 'max_gradient', 'momentum', "
        "'optimizer', 'optimizer_state_dtype', 'output_dtype', 'prefetch_pipeline', "
        "'stochastic_rounding', 'weight_decay', 'weight_decay_mode']: remove them, or give them to "
        "the sharder of static tables",
    ),
    "optimizer_of_fused_params": (
        TABLE,
        {"fused_params": {"optimizer": EmbOptimType.SHAMPOO}},
        "NotImplementedError: EmbeddingBagCollection: table 'users': fused_params has optimizer "
        f"{EmbOptimType.SHAMPOO!r}, expected one of ['sgd', 'exact_sgd', 'lars_sgd', "
        "'exact_adagrad', 'row_wise_adagrad', 'exact_row_wise_adagrad', 'adam', "
        "'partial_row_wise_adam', 'lamb', 'partial_row_wise_lamb', 'DynamicEmbOptimType.FTRL']; "
        "or give the sharder optimizer=, one of torch_dynemb's configs",
    ),
    "weight_decay_without_mode": (
        TABLE,
        {"fused_params": {"weight_decay": 0.1}},
        "ValueError: EmbeddingBagCollection: table 'users': fused_params has weight_decay 0.1, but "
        "weight_decay_mode NONE, which ignores it: give WeightDecayMode.L2 or "
        "WeightDecayMode.DECOUPLE",
    ),
    "weight_decay_mode": (
        TABLE,
        {"fused_params": {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.COUNTER}},
        "NotImplementedError: EmbeddingBagCollection: table 'users': fused_params has "
        f"weight_decay_mode {WeightDecayMode.COUNTER}, expected NONE, L2 or DECOUPLE; for rows "
        "that shrink by the steps since their last update, give the sharder "
        "optimizer=torch_dynemb.RowWiseRMSprop(ar_alpha=...)",
    ),
    "counter_based_regularization": (
        TABLE,
        {
            "fused_params": {
                "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                "counter_based_regularization": CounterBasedRegularizationDefinition(),
            }
        },
        "NotImplementedError: EmbeddingBagCollection: table 'users': fused_params has "
        "['counter_based_regularization'], which dynamic tables lack: for rows that "
        "shrink by the steps since their last update, give the sharder "
        "optimizer=torch_dynemb.RowWiseRMSprop(ar_alpha=...)",
    ),
    "output_dtype": (
        TABLE,
        {"fused_params": {"output_dtype": SparseType.INT8}},
        "NotImplementedError: EmbeddingBagCollection: table 'users': fused_params has output_dtype "
        f"{SparseType.INT8}, expected FP32, FP16 or BF16",
    ),
    "data_type": (
        replace(TABLE, data_type="INT8"),
        {},
        "TypeError: table 'users': data_type is INT8, expected FP32, FP16 or BF16: rows "
        "of other types cannot be trained",
    ),
    "storage": (
        TABLE,
        {
            "options": {
                "users": TableOptions(storage=td.SSDStore("rows"), delayed_gradients="apply")
            }
        },
        "ValueError: EmbeddingBagCollection: table 'users' has storage "
        f"{td.SSDStore('rows')} and an optimizer with delayed_gradients='apply', but rows stay in "
        "their place only until the end of the step that looks them up, so later gradients would "
        "be lost: leave delayed_gradients 'raise', or storage out",
    ),
    "column_shard": (
        replace(TABLE, dim=12, sharding="column_wise", columns_per_rank=(6, 6)),
        {},
        "ValueError: table 'users': a column shard begins at column 6, expected a multiple of 4: "
        "choose another min_partition",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sharding_refuses(two_ranks: Ranks, case: str) -> None:
    table, arguments, message = REFUSED[case]
    assert message in two_ranks.run(refusal, (table,), arguments)


def users(**options: Any) -> dict[str, Any]:
    """Arguments with these options of the table."""
    return {"options": {"users": TableOptions(**options)}}


def policy(**entries: Any) -> dict[str, Any]:
    return users(policy=td.Policy(**entries))


def stored(storage: Any) -> dict[str, Any]:
    return users(storage=storage)


ADAM = {"optimizer": EmbOptimType.ADAM}
# what rank 0 and rank 1 are given: table and arguments; and the option with its values
GIVEN: dict[str, tuple[tuple[Table, dict[str, Any]], tuple[Table, dict[str, Any]], str]] = {
    "capacity": (
        (TABLE, policy(capacity=100)),
        (TABLE, policy(capacity=200)),
        "options.policy.capacity differs between ranks: 100 on rank 0; 200 on rank 1",
    ),
    "score": (
        (TABLE, policy(score="step")),
        (TABLE, policy(score=("frequency", "step"))),
        "options.policy.score differs between ranks: 'step' on rank 0; ['frequency', 'step'] on "
        "rank 1",
    ),
    "admission": (
        (TABLE, policy(admission=td.AdmitFrequent(2))),
        (TABLE, policy(admission=td.AdmitByChance(0.5))),
        "options.policy.admission differs between ranks: AdmitFrequent(threshold=2, "
        "half_life=None, half_life_steps=None) on rank 0; "
        "AdmitByChance(probability=0.5) on rank 1",
    ),
    "refused": (
        (TABLE, policy(refused=torch.zeros(8))),
        (TABLE, policy(refused=torch.full((8,), 0.5))),
        "options.policy.refused differs between ranks: tensor((8,), torch.float32, sha256 ",
    ),
    "initializer": (
        (TABLE, users(initializer=td.Normal(0.0, 0.1))),
        (TABLE, users(initializer=td.Normal(0.0, 0.2))),
        "options.initializer differs between ranks: Normal(mean=0.0, std=0.1) on rank 0; "
        "Normal(mean=0.0, std=0.2) on rank 1",
    ),
    "planned": (
        (TABLE, {"options": {}, "planned_options": {"users": TableOptions(padding_idx=0)}}),
        (TABLE, {"options": {}, "planned_options": {"users": TableOptions()}}),
        "planned options.padding_idx differs between ranks: 0 on rank 0; None on rank 1",
    ),
    "optimizer": (
        (TABLE, {"optimizer": td.Adam(lr=0.1)}),
        (TABLE, {"optimizer": td.SGD(lr=0.1)}),
        "optimizer differs between ranks: Adam on rank 0; SGD on rank 1 (and so do table 'users': "
        "optimizer.",
    ),
    "hyper-parameter": (
        (TABLE, {"optimizer": td.Adam(lr=0.1)}),
        (TABLE, {"optimizer": td.Adam(lr=0.1, eps=1e-3)}),
        "optimizer.eps differs between ranks: 1e-08 on rank 0; 0.001 on rank 1: the ranks share "
        "the tables, so give all of them the same",
    ),
    "fused_params": (
        (TABLE, {"fused_params": {**ADAM, "learning_rate": 0.1}}),
        (TABLE, {"fused_params": {**ADAM, "learning_rate": 0.2}}),
        "fused_params['learning_rate'] differs between ranks: 0.1 on rank 0; 0.2 on rank 1",
    ),
    "dtype": (
        (TABLE, {}),
        (replace(TABLE, data_type="BF16"), {}),
        "data_type differs between ranks: DataType.FP32 on rank 0; DataType.BF16 on rank 1",
    ),
    "bounds of initial values": (
        (TABLE, {}),
        (replace(TABLE, num_embeddings=8), {}),
        "num_embeddings differs between ranks: 7 on rank 0; 8 on rank 1",
    ),
    "plan": (
        (replace(TABLE, sharding="row_wise"), {}),
        (replace(TABLE, sharding="table_wise"), {}),
        "ranks differs between ranks: [0, 1] on rank 0; [0] on rank 1 (and so do table 'users': "
        "sharding_spec, table 'users': sharding_type)",
    ),
    "static on one": (
        (TABLE, {}),
        (replace(TABLE, dynamic=False), {"options": {}}),
        "compute_kernel differs between ranks: 'customized_kernel' on rank 0; 'fused' on rank 1",
    ),
    "storage": (
        (TABLE, stored(td.SSDStore("/a"))),
        (TABLE, stored(td.SSDStore("/b"))),
        "options.storage differs between ranks: SSDStore(path='/a', cache=0.25, ",
    ),
    "storage of one": (
        (TABLE, stored(td.ExternalStore(RecordDict()))),
        (TABLE, stored(None)),
        "options.storage differs between ranks: ExternalStore(record_dict.RecordDict, cache=0.25, ",
    ),
    "an error of one": (
        (TABLE, {}),
        (TABLE, {"fused_params": {"no such entry": 1}}),
        "fused_params['no such entry'] differs between ranks: not given on rank 0; 1 on rank 1",
    ),
}


def test_ranks_with_different_options_all_raise(two_ranks: Ranks) -> None:
    cases = {
        name: [((table,), arguments) for table, arguments in by_rank]
        for name, (*by_rank, _) in GIVEN.items()
    }
    other = (replace(TABLE, name="others", features=("other",)),)
    cases["names"] = [((TABLE,), {}), (other, {})]
    cases["equal"] = [((TABLE,), policy(capacity=100, admission=td.AdmitFrequent(2)))] * 2
    cases["equal objects"] = [((TABLE,), policy(refused=torch.ones(8))) for _ in range(2)]
    by_rank = two_ranks.run(refusals, cases)
    assert by_rank[0] == by_rank[1]
    raised = by_rank[0]
    for name, (_, _, message) in GIVEN.items():
        assert raised[name].startswith(
            f"ValueError: EmbeddingBagCollection: table 'users': {message}"
        ), (name, raised[name])
    assert raised["names"].startswith(
        "ValueError: EmbeddingBagCollection: tables differs between ranks: ['users'] on rank 0; "
        "['others'] on rank 1"
    )
    assert raised["equal"] == raised["equal objects"] == "nothing"


SHARDER_REFUSES = {
    "env": "RuntimeError: EmbeddingBagCollection: env is None: call torch.distributed.init_process",
    "local env": "RuntimeError: EmbeddingBagCollection: env is without a process group: call torch",
    "meta": "ValueError: EmbeddingBagCollection: device is 'meta', which has no memory for rows",
    "module": "TypeError: DynamicEmbeddingBagCollectionSharder: module has type Linear, expected "
    "EmbeddingBagCollection",
    "collection": "TypeError: DynamicEmbeddingCollectionSharder: module has type "
    "EmbeddingBagCollection, expected EmbeddingCollection",
    "kernel": "ValueError: EmbeddingBagCollection: the plan has compute_kernel 'dynamic' for table "
    "'a', expected 'customized_kernel' for a dynamic table, else one of ['dense', 'fused', ",
    "sharding_spec": "ValueError: EmbeddingBagCollection: the plan has no sharding_spec for table "
    "'a': make it by a planner",
    "fewer tables": "ValueError: EmbeddingBagCollection: the plan lacks tables ['b'], it has "
    "['a']: plan all tables of the module, which are ['a', 'b']",
    "more tables": "ValueError: EmbeddingBagCollection: the plan has tables ['c'], but those of "
    "the module are ['a', 'b']: correct or remove these names",
    "codecs": "TypeError: DynamicEmbeddingBagCollectionSharder: qcomm_codecs_registry is a "
    "QCommsConfig, expected a dict of codecs by collective: get_qcomm_codecs_registry(config) of "
    "torchrec.distributed.fbgemm_qcomm_codec makes it of a QCommsConfig",
    "as it was": "nothing",
}


def test_sharders_refuse_by_name(two_ranks: Ranks) -> None:
    for raised in two_ranks.run(sharder_refusals):
        assert raised.keys() == SHARDER_REFUSES.keys()
        for name, message in SHARDER_REFUSES.items():
            assert raised[name].startswith(message), (name, raised[name])


KEYS = "['f_a', 'f_b']"
BATCH_REFUSES = {
    "dict": "TypeError: {}: features is a dict, expected a KeyedJaggedTensor",
    "none": "TypeError: {}: features is a NoneType, expected a KeyedJaggedTensor",
    "jagged": "TypeError: {}: features is a JaggedTensor, expected a KeyedJaggedTensor",
    **{
        dtype: f"TypeError: {{}}: ids of features {KEYS} have dtype torch.{dtype}, expected int64 "
        "or int32"
        for dtype in ("float32", "bool", "int8", "uint8")
    },
    "missing": "KeyError: {}: features lacks ['f_b']; it has ['f_a', 'f_c']: every batch has all",
    "twice": "ValueError: {}: keys must be unique, but those of features are "
    "['f_a', 'f_b', 'f_a'], expected every key once",
    "too long": "ValueError: {}: lengths of features ['f_b'] are from 1 to 5, expected 0 to 4, ",
    "longer": f"ValueError: {{}}: lengths of features {KEYS} add up to 5 from position 0, but "
    "there are 4 ids: lengths must add up to their number, and offsets go from 0 to it",
    "negative": "ValueError: {}: lengths of features ['f_a'] are from -1 to 2, expected 0 to 4",
    "decreasing": "ValueError: {}: lengths of features ['f_a'] are from -1 to 3, expected 0 to "
    "4, the number of ids: offsets must not decrease",
    "from 1": f"ValueError: {{}}: lengths of features {KEYS} add up to 2 from position 1, but ",
    "number": "ValueError: {}: features has 3 lengths, expected 2: 2 features * batch size 1",
    "stride": "ValueError: {}: features has 4 lengths, expected 6: 2 features * batch size 3",
    "int weights": "TypeError: {}: weights of features have dtype torch.int64, expected float32",
    "few weights": "ValueError: {}: weights of features have shape (3,), expected that of the ids",
    "no inverse": "ValueError: {}: features has a batch size per feature, but no inverse_indices, ",
    "other order": f"ValueError: {{}}: keys of features are ['f_b', 'f_a'], but those of the "
    f"first batch were {KEYS}, and TorchRec finds features by position",
    "weights here only": "ValueError: {}: features ['f_",
    "other dtype": "ValueError: {}: features ['f_",
    "no weights": "ValueError: {}: features ['f_",
}


@pytest.mark.parametrize(
    ("ranks", "pooling", "weighted"),
    [
        ("two_ranks", "sum", False),
        ("two_ranks", "sum", True),
        ("two_ranks", "none", False),
        pytest.param("four_ranks", "sum", False, marks=pytest.mark.long),
        pytest.param("four_ranks", "none", False, marks=pytest.mark.long),
    ],
)
def test_all_ranks_refuse_the_wrong_batch_of_one(
    request: pytest.FixtureRequest, ranks: str, pooling: str, weighted: bool
) -> None:
    given: Ranks = request.getfixturevalue(ranks)
    owner = "EmbeddingCollection" if pooling == "none" else "EmbeddingBagCollection"
    for first, later in given.run(batch_refusals, pooling, weighted):
        for raised in (first, later):
            assert len(raised) >= 17
            for name, message in raised.items():
                expected = BATCH_REFUSES[name].format(f"rank {given.world_size - 1}: {owner}")
                assert message.startswith(expected), (name, message)


def test_the_second_of_two_collections_refuses(two_ranks: Ranks) -> None:
    for raised in two_ranks.run(refused_by_the_second):
        assert len(raised) == 9
        for message in raised:
            assert message.startswith(
                "KeyError: rank 1: EmbeddingCollection: features lacks ['f_b']; it has ['f_a', 'f"
            )


def test_all_ranks_refuse_collections_in_another_order(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(in_another_order)
    assert first == second
    assert first.startswith(
        "RuntimeError: rank 0 begins a lookup by EmbeddingBagCollection of tables 'a', 'c', but "
        "rank 1 begins a lookup by EmbeddingCollection of table 'b': look up the same tables"
    )


@pytest.mark.parametrize(
    "sharder", [DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder]
)
def test_sharder_refuses_what_is_no_config(sharder: Any) -> None:
    with pytest.raises(TypeError) as raised:
        sharder(optimizer=EmbOptimType.ADAM)
    assert str(raised.value) == (
        f"{sharder.__name__}: optimizer is {EmbOptimType.ADAM!r}, expected a config such as "
        "torch_dynemb.Adam(lr=1e-3); EmbOptimType goes into fused_params"
    )
    with pytest.raises(TypeError) as raised:
        sharder(options={"users": 3})
    assert str(raised.value) == (
        f"{sharder.__name__}: options['users'] is 3, expected TableOptions(...)"
    )
    with pytest.raises(TypeError, match=r"options is 3, expected TableOptions\(...\), a dict: Ta"):
        sharder(options=3)
    with pytest.raises(TypeError, match=r"fused_params is .*expected a dict: such as \{'opt"):
        sharder(fused_params=EmbOptimType.ADAM)
    with pytest.raises(ValueError, match=r"codecs_registry has 'all', expected some of \['POOLED_"):
        sharder(qcomm_codecs_registry={"all": None})
    with pytest.raises(TypeError, match=r"\['POOLED_EMBEDDINGS_ALL_TO_ALL'\] is a int, expected Q"):
        sharder(qcomm_codecs_registry={"POOLED_EMBEDDINGS_ALL_TO_ALL": 3})


def test_sharders_warn_of_plans_without_dynamic_tables() -> None:
    class Planned(DynamicEmbeddingBagCollectionSharder):
        sharded_module_type: Any = lambda *given, **options: nn.Identity()

    env = ShardingEnv(world_size=2, rank=0)
    params = {"users": ParameterSharding("table_wise", "fused", [0])}
    with pytest.warns(UserWarning, match=r"'bags' dynamic, so \['users'\] have num_embeddings"):
        Planned().shard(bags(users=8), params, env, module_fqn="bags")
    params["ads"] = ParameterSharding("table_wise", "customized_kernel", [0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Planned().shard(bags(users=8, ads=8), params, env)


def test_options_refuse_what_is_none() -> None:
    with pytest.raises(TypeError) as raised:
        TableOptions(initializer="normal")  # type: ignore[arg-type]
    assert str(raised.value) == (
        "TableOptions: initializer is 'normal', expected one of torch_dynemb's initializers, such "
        "as Uniform(-0.01, 0.01)"
    )
    with pytest.raises(TypeError) as raised:
        TableOptions(policy=3)  # type: ignore[arg-type]
    assert str(raised.value) == "TableOptions: policy is 3, expected torch_dynemb.Policy(...)"
    message = "TableOptions: storage is '/rows', expected HostStore, SSD"
    with pytest.raises(TypeError, match=message):
        TableOptions(storage="/rows")  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
def test_what_needs_row_numbers_is_refused() -> None:
    table = replace(TABLE, pooling="none")

    [kernel] = kernels(sharded((table,)))
    for name in ("_emb_module", "emb_module"):  # of managed collisions, of pruning
        with pytest.raises(NotImplementedError, match="managed collisions, pruning and trackers"):
            getattr(kernel, name)
