"""The package of DynamicEmb's names: its modules, what it does not offer, and its registration."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from package_steps import (
    PACKAGE,
    after_registration,
    before_registration,
    beside_another,
    imported,
    registered,
)
from quick_packages import QUICK
from ranks import Ranks
from torch._inductor import config as compiler
from torchrec import DataType, EmbeddingConfig

import torch_dynemb as td
from torch_dynemb.compat import dynamicemb
from torch_dynemb.compat.dynamicemb.dynamicemb_config import (
    MAX_BUCKET_CAPACITY,
    align_to_table_size,
    get_optimizer_state_dim,
    get_sharded_table_capacity,
)
from torch_dynemb.compat.dynamicemb.incremental_dump import (
    get_score,
    incremental_dump,
    set_score,
)
from torch_dynemb.compat.dynamicemb.not_offered import MODULES, NAMES
from torch_dynemb.compat.dynamicemb.optimizer import convert_optimizer_type
from torch_dynemb.ops.columns import CLOCK_HEAD
from torch_dynemb.torchrec import DynamicEmbeddingShardingPlanner

pytestmark = pytest.mark.cpu_only("imports of names")

# What programs import, by module of DynamicEmb.
IMPORTED = {
    "": (
        "DynamicEmbCheckMode DynamicEmbDump DynamicEmbInitializerArgs DynamicEmbInitializerMode "
        "DynamicEmbLoad DynamicEmbScoreStrategy DynamicEmbTableOptions EmbOptimType "
        "FrequencyAdmissionStrategy KVCounter align_to_table_size data_type_to_dtype "
        "ProbabilisticAdmissionStrategy DynamicEmbOptimType "
        "get_sharded_table_capacity get_table_value_bytes BUCKET_ALIGNMENT MAX_BUCKET_CAPACITY "
        "EvictedItemMode pop_evicted_keys"
    ),
    "planner": (
        "DynamicEmbParameterConstraints DynamicEmbeddingEnumerator DynamicEmbeddingShardingPlanner"
    ),
    "shard": (
        "DynamicEmbeddingBagCollectionSharder DynamicEmbeddingCollectionSharder "
        "ShardedDynamicEmbeddingBagCollection ShardedDynamicEmbeddingCollection"
    ),
    "optimizer": (
        "DynamicEmbOptimType EmbOptimType convert_optimizer_type get_optimizer_state_dim"
    ),
    "incremental_dump": "get_score incremental_dump pop_evicted_keys set_score",
    "dump_load": "DynamicEmbDump DynamicEmbLoad",
    "dynamicemb_config": (
        "BUCKET_ALIGNMENT MAX_BUCKET_CAPACITY DynamicEmbCheckMode DynamicEmbInitializerArgs "
        "DynamicEmbInitializerMode DynamicEmbScoreStrategy DynamicEmbTableOptions "
        "align_to_table_size data_type_to_dtype get_optimizer_state_dim get_sharded_table_capacity "
        "get_table_value_bytes EvictedItemMode"
    ),
    "types": (
        "BUCKET_ALIGNMENT MAX_BUCKET_CAPACITY DynamicEmbInitializerArgs DynamicEmbInitializerMode"
    ),
    "embedding_admission": "FrequencyAdmissionStrategy KVCounter ProbabilisticAdmissionStrategy",
}


# Public names of DynamicEmb v26.10 by module, of modules that are offered.
NEWEST = {
    "": (
        "AdmissionStrategy BATCH_SIZE_PER_DUMP BUCKET_ALIGNMENT Counter DEMB_TABLE_ALIGN_SIZE "
        "DeltaDumpResult DynamicEmbCheckMode DynamicEmbDump DynamicEmbEvictStrategy "
        "DynamicEmbInitializerArgs DynamicEmbInitializerMode DynamicEmbLoad DynamicEmbOptimType "
        "DynamicEmbPoolingMode DynamicEmbScoreStrategy DynamicEmbTableOptions EmbOptimType "
        "EvictedItemMode FrequencyAdmissionStrategy KVCounter MAX_BUCKET_CAPACITY "
        "MultiTableAdmitter MultiTableFrequencyAdmitter MultiTableProbabilisticAdmitter "
        "OptimizerArgs ProbabilisticAdmissionStrategy ReplayContent ReplayStats ScoreStrategy "
        "align_to_table_size data_type_to_dtype data_type_to_dyn_emb dyn_emb_to_torch "
        "get_sharded_table_capacity get_table_value_bytes pop_erased_keys pop_evicted_keys "
        "replay_increment string_to_evict_strategy torch_to_dyn_emb"
    ),
    "dump_load": (
        "DynamicEmbDump DynamicEmbLoad check_emb_collection_modules find_sharded_modules "
        "get_dynamic_emb_module"
    ),
    "dynamicemb_config": (
        "BATCH_SIZE_PER_DUMP DEBUG_EMB_INITIALIZER_MOD DEFAULT_BUCKET_CAPACITY DEFAULT_INDEX_TYPE "
        "DYNAMICEMB_CSTM_SCORE_CHECK DynamicEmbCheckMode DynamicEmbEvictStrategy DynamicEmbKernel "
        "DynamicEmbPoolingMode DynamicEmbScoreStrategy DynamicEmbTableOptions EvictedItemMode "
        "ReplayContent SUPPORTED_COMPOUND_SCORE_STRATEGIES SUPPORTED_DIST_TYPES ScoreStrategy "
        "align_to_table_size complete_initializer_args data_type_to_dtype data_type_to_dyn_emb "
        "dtype_to_bytes dyn_emb_to_torch get_constraint_capacity get_eviction_score_strategy "
        "get_physical_score_order get_sharded_table_capacity get_table_value_bytes "
        "normalize_score_strategy score_dump_permutation score_load_permutation "
        "score_strategy_has_timestamp_column string_to_evict_strategy validate_score_strategy "
        "warning_for_cstm_score"
    ),
    "embedding_admission": (
        "FrequencyAdmissionStrategy KVCounter MultiTableFrequencyAdmitter MultiTableKVCounter "
        "MultiTableProbabilisticAdmitter ProbabilisticAdmissionStrategy"
    ),
    "incremental_dump": (
        "DeltaDumpResult get_score incremental_dump is_valid_score_threshold pop_erased_keys "
        "pop_evicted_keys replay_increment set_score"
    ),
    "optimizer": (
        "AdaGradDynamicEmbeddingOptimizer AdamDynamicEmbeddingOptimizer "
        "BaseDynamicEmbeddingOptimizer DynamicEmbOptimType EmbOptimType "
        "FTRLDynamicEmbeddingOptimizer OptimType OptimizerArgs "
        "RowWiseAdaGradDynamicEmbeddingOptimizer SGDDynamicEmbeddingOptimizer "
        "get_optimizer_ckpt_state_dim get_optimizer_state_dim get_required_arg string_to_opt_type"
    ),
    "planner": (
        "DynamicEmbParameterConstraints DynamicEmbParameterSharding DynamicEmbStorageReservation "
        "DynamicEmbeddingEnumerator DynamicEmbeddingShardingPlanner get_planner"
    ),
    "shard": (
        "DynamicEmbeddingBagCollectionSharder DynamicEmbeddingCollectionSharder "
        "ShardedDynamicEmbeddingBagCollection ShardedDynamicEmbeddingCollection"
    ),
    "types": (
        "AdmissionStrategy BUCKET_ALIGNMENT COUNTER_TYPE Cache CopyMode Counter "
        "DEFAULT_UNIFORM_LOWER DEFAULT_UNIFORM_UPPER DEMB_TABLE_ALIGN_SIZE "
        "DynamicEmbInitializerArgs DynamicEmbInitializerMode EMBEDDING_TYPE KEY_TYPE "
        "MAX_BUCKET_CAPACITY MemoryType MultiTableAdmitter OPT_STATE_TYPE ReplayStats SCORE_TYPE "
        "Storage group_key_of torch_dtype_to_np_dtype"
    ),
}
# Its other modules.
NEWEST_MODULES = (
    "batched_dynamicemb_compute_kernel batched_dynamicemb_function batched_dynamicemb_tables "
    "construct_twin_module exportable_embedding exportable_tables extendable_tensor "
    "index_range_meta initializer input_dist jit key_ownership key_value_table lookup_layout "
    "lookup_meta output_dist scored_hashtable utils"
)


@pytest.fixture
def process() -> Iterator[Ranks]:
    """A process of one test, which has imported DynamicEmb's names and not registered them."""
    own = Ranks(1)
    own.run(imported)
    yield own
    own.stop()


@pytest.mark.parametrize("name", IMPORTED)
def test_modules_have_the_names_that_programs_import(name: str) -> None:
    module = importlib.import_module(f"{PACKAGE}.{name}" if name else PACKAGE)
    expected = set(IMPORTED[name].split())
    if name:
        assert set(module.__all__) == expected
    assert expected <= set(module.__all__)
    for found in module.__all__:
        thing = getattr(module, found)
        assert isinstance(thing, int) or thing.__name__ == found


def test_the_package_has_the_names_of_planner_and_sharders() -> None:
    assert dynamicemb.DynamicEmbeddingShardingPlanner is DynamicEmbeddingShardingPlanner
    for module in ("planner", "shard"):
        for name in IMPORTED[module].split():
            if not name.startswith("Sharded"):
                assert name in dynamicemb.__all__


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_that_is_not_offered_says_what_to_use(name: str) -> None:
    for module in IMPORTED:
        path = f"{PACKAGE}.{module}" if module else PACKAGE
        shown = f"dynamicemb.{module}.{name}" if module else f"dynamicemb.{name}"
        with pytest.raises(ImportError) as caught:
            getattr(importlib.import_module(path), name)
        text = str(caught.value)
        assert text == f"torch_dynemb does not offer {shown} of DynamicEmb: {NAMES[name]}"


def test_what_is_offered_is_not_refused() -> None:
    offered = {name for names in IMPORTED.values() for name in names.split()}
    assert not offered & NAMES.keys()
    assert not IMPORTED.keys() & MODULES.keys()


def test_every_name_of_the_newest_dynamicemb_is_offered_or_refused() -> None:
    assert NEWEST.keys() == IMPORTED.keys()
    for module, names in NEWEST.items():
        offered = importlib.import_module(f"{PACKAGE}.{module}" if module else PACKAGE).__all__
        assert [name for name in names.split() if (name in offered) == (name in NAMES)] == []
    assert set(NEWEST_MODULES.split()) <= MODULES.keys()


def test_other_names_raise_as_in_any_module() -> None:
    assert not hasattr(dynamicemb, "nothing_of_the_kind")
    with pytest.raises(
        AttributeError, match=r"planner has no attribute 'nothing', expected one of"
    ):
        importlib.import_module(f"{PACKAGE}.planner").nothing  # noqa: B018


def test_registration_in_a_fresh_process(process: Ranks) -> None:
    (said,) = process.run(before_registration)
    assert said[0] == "ModuleNotFoundError: No module named 'dynamicemb'"
    assert said[1].startswith(
        "ModuleNotFoundError: torch_dynemb does not offer dynamicemb.inference of DynamicEmb: use "
        "frozen = torch_dynemb.freeze(model); torch_dynemb.serving.export(frozen, path, (inputs,)) "
    )
    assert "does not offer dynamicemb.key_value_table of DynamicEmb: use" in said[2]
    for name in ("dynamicemb", "dynamicemb.planner", "dynamicemb.elsewhere"):
        ((text, left),) = process.run(beside_another, name)
        assert text == (
            f"register_as_dynamicemb: {name} has been imported from /site-packages/other.py: call "
            "register_as_dynamicemb() before the first import of dynamicemb"
        )
        assert left == []
    (same,) = process.run(registered)
    assert {"planner", "shard", "optimizer", "incremental_dump", "dump_load"} <= same.keys()
    assert [name for name, is_same in same.items() if not is_same] == []


def test_imports_after_the_registration(process: Ranks) -> None:
    process.run(registered)
    (said,) = process.run(after_registration)
    offer = "torch_dynemb does not offer dynamicemb"
    for text, begins in zip(
        said,
        (
            f"ModuleNotFoundError: {offer}.batched_dynamicemb_tables of DynamicEmb: use torch_",
            f"ModuleNotFoundError: {offer}.inference of DynamicEmb: use frozen = torch_d",
            f"ModuleNotFoundError: {offer}_extensions of DynamicEmb: use torch_dynemb.ops",
            f"ImportError: {offer}.UniqueOp of DynamicEmb: use torch_dynemb.ops.unique_ids",
            f"ImportError: {offer}.UniqueOp of DynamicEmb: use torch_dynemb.ops.unique_ids",
            f"ImportError: {offer}.incremental_dump.replay_increment of DynamicEmb: increme",
            "ImportError: cannot import name 'nothing_of_the_kind' from",
            "ModuleNotFoundError: No module named 'dynamicemb.nothing_of_the_kind'",
            "",
        ),
        strict=True,
    ):
        assert text.startswith(begins)
        assert bool(text) == bool(begins)


def test_remedies_name_what_exists() -> None:
    from torch_dynemb import delta_log, migrate, ops, serving, torchrec

    assert callable(ops.unique_ids)
    assert callable(migrate.read_dynamicemb)
    assert callable(torchrec.local_shards)
    assert callable(serving.export)
    for found in (td.freeze, td.AdmitBy, td.SSDStore, td.ExternalStore, delta_log.DeltaLog):
        assert callable(found)
    group = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1)).group
    assert callable(group.evicted.record)
    arguments = dynamicemb.DynamicEmbInitializerArgs()
    assert arguments.initializer(100) == td.Uniform(-0.1, 0.1)


@pytest.mark.long
def test_the_remedy_of_serving_is_code_that_runs(tmp_path: Path) -> None:
    code, loading = re.findall(r"(?:use|for) (.*?\))(?: writes|, and)", MODULES["inference"])
    table = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
    given = {"model": table, "inputs": torch.arange(3), "path": tmp_path / "package"}
    given |= {"torch_dynemb": td}
    expected = table(given["inputs"])
    with compiler.patch(QUICK):
        exec(code, given)
    served = eval(loading, given)
    assert torch.equal(served.run(given["inputs"]), expected)


def config(rows: int, data_type: DataType = DataType.FP32) -> EmbeddingConfig:
    return EmbeddingConfig(
        name="t",
        embedding_dim=8,
        num_embeddings=rows,
        feature_names=["f"],
        data_type=data_type,
    )


@pytest.mark.parametrize(
    ("rows", "ranks", "bucket", "expected"),
    [
        (1000, 1, 128, 1024),
        (1000, 2, 128, 512),
        (1024, 2, 128, 512),
        (1025, 2, 128, 640),
        (2, 8, 128, 128),
        (1000, 3, 16, 336),
        (1000, 1, MAX_BUCKET_CAPACITY, 1008),
        (10**9, 8, 1024, 125_000_704),
    ],
)
def test_capacity_of_a_rank(rows: int, ranks: int, bucket: int, expected: int) -> None:
    assert get_sharded_table_capacity(config(rows), ranks, bucket) == expected
    bytes_of_all = dynamicemb.get_table_value_bytes(
        config(rows, DataType.BF16), EmbOptimType.EXACT_ADAGRAD, ranks, bucket
    )
    assert bytes_of_all == expected * ranks * 2 * 8 * 2


def test_sizes_are_rounded_up() -> None:
    assert [align_to_table_size(n) for n in (-5, 0, 1, 16, 17)] == [16, 16, 16, 16, 32]
    assert align_to_table_size(7, 5) == 10
    kinds = EmbOptimType
    assert get_optimizer_state_dim(convert_optimizer_type(kinds.ADAM), 8, torch.float32) == 16
    assert get_optimizer_state_dim(kinds.EXACT_ADAGRAD, 8) == 8
    assert get_optimizer_state_dim(dynamicemb.DynamicEmbOptimType.FTRL, 8) == 16
    assert get_optimizer_state_dim(kinds.EXACT_SGD, 8) == 0
    assert get_optimizer_state_dim(kinds.EXACT_ROWWISE_ADAGRAD, 8, torch.float32) == 4
    assert get_optimizer_state_dim(kinds.EXACT_ROWWISE_ADAGRAD, 8, torch.bfloat16) == 8


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (
            TypeError,
            "embedding_config is 3, expected an EmbeddingConfig",
            lambda: get_sharded_table_capacity(3, 1, 128),  # type: ignore[arg-type]
        ),
        (
            ValueError,
            "get_sharded_table_capacity: world_size is 0, expected at least 1",
            lambda: get_sharded_table_capacity(config(9), 0, 128),
        ),
        (
            ValueError,
            "bucket_capacity is 100, expected a multiple of BUCKET_ALIGNMENT, 16",
            lambda: get_sharded_table_capacity(config(9), 1, 100),
        ),
        (
            TypeError,
            "bucket_capacity is 1.5, expected int",
            lambda: get_sharded_table_capacity(config(9), 1, 1.5),  # type: ignore[arg-type]
        ),
        (ValueError, "alignment is 0", lambda: align_to_table_size(3, 0)),
        (
            TypeError,
            "dtype is None, expected the dtype of the rows",
            lambda: get_optimizer_state_dim(EmbOptimType.EXACT_ROWWISE_ADAGRAD, 8),
        ),
        (
            NotImplementedError,
            "get_optimizer_state_dim: fused_params has optimizer",
            lambda: get_optimizer_state_dim(EmbOptimType.SHAMPOO, 8),
        ),
        (
            TypeError,
            "optimizer is 'adam', expected an EmbOptimType",
            lambda: convert_optimizer_type("adam"),  # type: ignore[arg-type]
        ),
        (
            NotImplementedError,
            "convert_optimizer_type: fused_params has optimizer",
            lambda: convert_optimizer_type(EmbOptimType.MADGRAD),
        ),
    ],
)
def test_wrong_sizes_are_refused(kind: type[Exception], message: str, call: object) -> None:
    with pytest.raises(kind, match=message):
        call()  # type: ignore[operator]


def scored(*scores: td.Policy) -> torch.nn.ModuleDict:
    tables = [td.TableConfig(f"table{n}", 4, policy=policy) for n, policy in enumerate(scores)]
    return torch.nn.ModuleDict(
        {"sparse": td.DynamicEmbeddingCollection(tables, optimizer=td.SGD(lr=0.1))}
    )


def test_scores_of_tables_are_those_of_the_next_lookup() -> None:
    model = scored(td.Policy(score="step"), td.Policy(score="frequency"), td.Policy(score="custom"))
    assert get_score(model) == {"model.sparse": {"table0": 0, "table1": 1, "table2": 0}}
    for step, custom in enumerate((5, 9)):
        set_score(model, {"sparse": {"table2": custom}})
        ids = torch.arange(step, step + 3)
        out = model["sparse"]({f"table{n}": ids for n in range(3)})
        sum(one.sum() for one in out.values()).backward()  # type: ignore[union-attr]
        model["sparse"].optimizer.step()
    scores = get_score(model)
    assert scores == {"model.sparse": {"table0": 2, "table1": 1, "table2": 9}}
    dumped = incremental_dump(model, {"model.sparse": {"table2": 9, "table0": 1}})
    assert dumped is not None
    rows = dumped[0]["model.sparse"]
    assert {name: of[0].tolist() for name, of in rows.items()} == {
        "table0": [1, 2, 3],
        "table2": [1, 2, 3],
    }


def test_times_are_those_of_the_next_lookup() -> None:
    model = scored(td.Policy(score="timestamp"))
    model["sparse"].optimizer.step(now=1000)
    found = get_score(model)
    assert found == {"model.sparse": {"table0": 1000}}
    model["sparse"]({"table0": torch.arange(3)})["table0"].sum().backward()
    dumped = incremental_dump(model, found)
    assert dumped is not None
    assert dumped[0]["model.sparse"]["table0"][0].tolist() == [0, 1, 2]


def test_increments_of_times_beside_counts_go_by_times() -> None:
    strategy = (
        dynamicemb.DynamicEmbScoreStrategy.TIMESTAMP,
        dynamicemb.DynamicEmbScoreStrategy.LFU,
    )
    options = dynamicemb.DynamicEmbTableOptions(score_strategy=strategy)
    policy = options.table_options(num_embeddings=1000, embedding_dim=4).policy
    model = scored(policy)
    for now, ids in ((1000, [1, 2]), (1000, [1, 2]), (2000, [2, 9])):
        model["sparse"].optimizer.step(now=now)
        since = get_score(model)
        model["sparse"]({"table0": torch.tensor(ids)})["table0"].sum().backward()
    assert since == {"model.sparse": {"table0": 2000}}
    for threshold, expected in ((since, [2, 9]), (2000, [2, 9]), (1000, [1, 2, 9])):
        dumped = incremental_dump(model, threshold)
        assert dumped is not None
        assert dumped[0]["model.sparse"]["table0"][0].tolist() == expected


def test_one_custom_score_for_all_tables() -> None:
    model = scored(td.Policy(score="custom"), td.Policy(score="custom"))
    set_score(model, 4)
    assert get_score(model) == {"model.sparse": {"table0": 4, "table1": 4}}


def test_wrong_scores_change_nothing() -> None:
    model = scored(td.Policy(score="custom"), td.Policy(score="step"), td.Policy())
    with pytest.raises(ValueError, match=r"get_score: table 'sparse.table2' keeps no scores"):
        get_score(model)
    for kind, message, score in (
        (ValueError, r"set_score: table 'sparse.table1' keeps no custom score.*CUSTOMIZED", 3),
        (ValueError, r"table 'sparse.table1' keeps no", {"sparse": {"table0": 3, "table1": 3}}),
        (ValueError, r"names table 'other' of 'sparse', but", {"sparse": {"other": 3}}),
        (ValueError, r"names table 'table0' of 'elsewhere', but", {"elsewhere": {"table0": 3}}),
        (ValueError, r"of 'sparse.table0' is -1, expected at least", {"sparse": {"table0": -1}}),
        (TypeError, r"set_score: table_score of 'sparse' is 3, expected", {"sparse": 3}),
        (TypeError, r"set_score: table_score is 'no', expected int", "no"),
    ):
        with pytest.raises(kind, match=message):
            set_score(model, score)  # type: ignore[arg-type]
    assert model["sparse"].group.index.clock[CLOCK_HEAD:].tolist() == [0, 0, 0]
    for call in (get_score, lambda model: set_score(model, 1)):
        with pytest.raises(TypeError, match=r"score: model is 3, expected a torch.nn.Module"):
            call(3)  # type: ignore[operator]
        with pytest.warns(UserWarning, match="score: the model has no dynamic tables"):
            assert call(torch.nn.Linear(1, 1)) is None  # type: ignore[operator]


def test_dumps_by_decayed_counts_are_of_now() -> None:
    model = scored(td.Policy(score="decayed", half_life="1d"))
    optimizer = model["sparse"].optimizer
    optimizer.step(now=86_400)
    model["sparse"]({"table0": torch.tensor([1, 1, 2, 2, 2, 2])})["table0"].sum().backward()
    for now, expected in ((86_400, [1, 2]), (2 * 86_400, [2])):
        optimizer.step(now=now)
        assert get_score(model) == {"model.sparse": {"table0": 1}}
        dumped = incremental_dump(model, 2)
        assert dumped is not None
        assert dumped[0]["model.sparse"]["table0"][0].tolist() == expected


def test_two_collections_of_one_name_need_their_path() -> None:
    def collection() -> torch.nn.ModuleDict:
        return scored(td.Policy(score="custom"))

    model = torch.nn.ModuleDict({"left": collection(), "right": collection()})
    with pytest.raises(ValueError, match=r"names table 'table0' of 'sparse'"):
        set_score(model, {"sparse": {"table0": 3}})
    set_score(model, {"model.right.sparse": {"table0": 3}})
    assert get_score(model) == {
        "model.left.sparse": {"table0": 0},
        "model.right.sparse": {"table0": 3},
    }
