"""Dynamic tables beside tables of TorchRec's own, and two collections in one model."""

from __future__ import annotations

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from ranks import Ranks
from sharded_models import SEQUENCE_SHARDINGS, Table
from sharded_training import Case, trains_as_unsharded

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

# what FBGEMM's kernels can do on a CPU
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
VOCABULARY = 7


def case(*tables: Table, kind: str = "plain") -> Case:
    return Case(
        tables, kind, fused_params=dict(SGD), optimizer=td.SGD(lr=0.1), vocabulary=VOCABULARY
    )


# TorchRec's data-parallel tables take no batch size per feature
STATIC_KINDS = [
    *((static, kind) for static in SEQUENCE_SHARDINGS for kind in ("plain", "vbe")),
    ("data_parallel", "plain"),
]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize(("static", "kind"), STATIC_KINDS)
@pytest.mark.parametrize("dynamic", ["table_wise", "row_wise", "column_wise"])
def test_dynamic_and_static_tables(
    two_ranks: Ranks, dynamic: str, static: str, pooling: str, kind: str
) -> None:
    two_ranks.run(
        trains_as_unsharded,
        case(
            Table("static_a", 8, ("a",), pooling, static, dynamic=False),
            Table("dynamic_b", 8, ("b", "c"), pooling, dynamic),
            Table("static_d", 16, ("d",), pooling, static, dynamic=False),
            Table("dynamic_e", 16, ("e",), pooling, dynamic),
            kind=kind,
        ),
    )


@pytest.mark.long_cases("table_row_wise")
@pytest.mark.parametrize("sharding", ["table_row_wise", "grid_shard"])
def test_dynamic_and_static_tables_of_two_nodes(four_ranks: Ranks, sharding: str) -> None:
    four_ranks.run(
        trains_as_unsharded,
        case(
            Table("static", 8, ("a",), "sum", "table_row_wise", dynamic=False),
            Table("dynamic", 16, ("b",), "mean", sharding),
        ),
    )


@pytest.mark.parametrize("static", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("dynamic", ["table_wise", "row_wise", "column_wise"])
def test_dynamic_and_static_sequences(two_ranks: Ranks, dynamic: str, static: str) -> None:
    two_ranks.run(
        trains_as_unsharded,
        case(
            Table("static", 8, ("a",), "none", static, dynamic=False),
            Table("dynamic", 8, ("b",), "none", dynamic),
        ),
    )


def test_every_sharding_type_in_one_collection(four_ranks: Ranks) -> None:
    four_ranks.run(
        trains_as_unsharded,
        case(
            Table("a", 16, ("a",), "mean", "table_row_wise"),
            Table("b", 16, ("b",), "sum", "grid_shard"),
            Table("c", 16, ("c",), "mean", "row_wise"),
            Table("d", 16, ("d",), "mean", "column_wise"),
            Table("e", 16, ("e",), "sum", "table_wise"),
            Table("f", 16, ("f",), "mean", "table_column_wise"),
        ),
    )


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_bags_and_sequences_in_one_model(two_ranks: Ranks, sharding: str) -> None:
    two_ranks.run(
        trains_as_unsharded,
        case(
            Table("bags", 16, ("a", "b"), "mean", sharding),
            Table("sequences", 8, ("c", "d"), "none", sharding),
        ),
    )
