"""Errors of sharding say what was given, what was expected and what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from ranks import Ranks
from refused_models import refusal
from sharded_models import Table

from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicTableConstraints,
    TableOptions,
)

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
        "ValueError: EmbeddingBagCollection: the plan makes table 'users' dynamic, but says not "
        "how: give its constraints to the planner as DynamicTableConstraints(TableOptions(...)), "
        "or options={'users': TableOptions(...)} to the sharder",
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
        "ValueError: EmbeddingBagCollection: options has tables ['users'], which the plan makes "
        "static: plan them with compute_kernel='customized_kernel', for a planner by "
        "DynamicTableConstraints",
    ),
    "unknown_fused_params": (
        TABLE,
        {"fused_params": {"cache_precision": 1, "learning_rate": 0.1}},
        "ValueError: EmbeddingBagCollection: table 'users': fused_params has ['cache_precision'], "
        "which mean nothing to a dynamic table, expected some of ['beta1', 'beta2', 'betas', "
        "'eps', 'eta', 'gradient_clipping', 'learning_rate', 'lr', 'max_gradient', 'momentum', "
        "'optimizer', 'output_dtype', 'prefetch_pipeline', 'stochastic_rounding', 'weight_decay', "
        "'weight_decay_mode']: remove them, or give them to the sharder of static tables",
    ),
    "optimizer_of_fused_params": (
        TABLE,
        {"fused_params": {"optimizer": EmbOptimType.SHAMPOO}},
        "NotImplementedError: EmbeddingBagCollection: table 'users': fused_params has optimizer "
        f"{EmbOptimType.SHAMPOO!r}, expected one of ['sgd', 'exact_sgd', 'lars_sgd', "
        "'exact_adagrad', 'row_wise_adagrad', 'exact_row_wise_adagrad', 'adam', "
        "'partial_row_wise_adam', 'lamb', 'partial_row_wise_lamb']; or give the sharder "
        "optimizer=, one of torch_dynemb's configs",
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
        f"weight_decay_mode {WeightDecayMode.COUNTER}, expected NONE, L2 or DECOUPLE",
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


def test_constraints_refuse_other_kernels() -> None:
    with pytest.raises(ValueError, match=r"compute_kernels is \['fused'\], expected none: the tab"):
        DynamicTableConstraints(OPTIONS, compute_kernels=["fused"])
    with pytest.raises(ValueError, match="key_value_params is for TorchRec's own key-value kern"):
        DynamicTableConstraints(OPTIONS, key_value_params=object())
    with pytest.raises(TypeError, match=r"options is 3, expected TableOptions\(...\)"):
        DynamicTableConstraints(3)  # type: ignore[arg-type]
