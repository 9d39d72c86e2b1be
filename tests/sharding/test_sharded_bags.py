"""EmbeddingBagCollection: every sharding type trains as an unsharded collection."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jagged_batches import KINDS
from ranks import Ranks
from sharded_models import BAG_SHARDINGS, FOUR_RANKS, Table
from sharded_training import ADAM, Case, trains_as_unsharded

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


def tables(sharding: str, pooling: str) -> tuple[Table, ...]:
    """Two features share a table; dims are mixed; sizes divide by nothing."""
    return (
        Table("one", 8, ("a", "b"), pooling, sharding, num_embeddings=1),
        Table("two", 16, ("c",), pooling, sharding, num_embeddings=7),
        Table("three", 8, ("d",), pooling, sharding, num_embeddings=7),
    )


@pytest.fixture
def ranks(request: pytest.FixtureRequest, sharding: str) -> Ranks:
    """As many as the sharding type needs."""
    ranks: Ranks = request.getfixturevalue("four_ranks" if sharding in FOUR_RANKS else "two_ranks")
    return ranks


# what is sent and stored is the same for both poolings
OF_SUMS = ("int32", "offsets", "extremes")
COMBINATIONS = [
    pytest.param(
        kind, pooling, marks=pytest.mark.long if pooling == "mean" and kind in OF_SUMS else ()
    )
    for kind in KINDS
    for pooling in ("sum", "mean")
]


@pytest.mark.parametrize(("kind", "pooling"), COMBINATIONS)
@pytest.mark.parametrize("sharding", BAG_SHARDINGS)
def test_trains_as_unsharded(ranks: Ranks, sharding: str, kind: str, pooling: str) -> None:
    case = Case(tables(sharding, pooling), kind)
    if sharding == "grid_shard" and kind.endswith("vbe"):
        for error in ranks.errors(trains_as_unsharded, case):
            assert (
                "EmbeddingBagCollection: tables ['one', 'two', 'three'] are grid_shard, and "
                "features has a batch size per feature, which TorchRec cannot reduce over a "
                "grid: choose another sharding type, or one batch size for all features"
            ) in error
        return
    assert min(ranks.run(trains_as_unsharded, case)) > 0


@pytest.mark.parametrize("sharding", BAG_SHARDINGS)
def test_one_feature_of_two_tables_that_pool_differently(ranks: Ranks, sharding: str) -> None:
    tables = (
        Table("mean", 8, ("a", "b"), "mean", sharding),
        Table("sum", 16, ("c", "a"), "sum", sharding),
    )
    ranks.run(trains_as_unsharded, Case(tables))


@pytest.mark.parametrize("kind", ["plain", "weighted"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("sharding", BAG_SHARDINGS)
def test_padding(ranks: Ranks, sharding: str, pooling: str, kind: str) -> None:
    padded = tuple(replace(table, padding_idx=3) for table in tables(sharding, pooling))
    ranks.run(trains_as_unsharded, Case(padded, kind, vocabulary=5))


@pytest.mark.parametrize("data_type", ["BF16", "FP16"])
@pytest.mark.parametrize("sharding", BAG_SHARDINGS)
def test_rows_of_half_precision(ranks: Ranks, sharding: str, data_type: str) -> None:
    half = tuple(replace(table, data_type=data_type) for table in tables(sharding, "mean"))
    ranks.run(
        trains_as_unsharded,
        Case(
            half,
            fused_params={**ADAM, "stochastic_rounding": False},
            optimizer=td.Adam(lr=0.1, stochastic_rounding=False),
            tolerance=1e-2,  # one bit
        ),
    )


@pytest.mark.parametrize("sharding", BAG_SHARDINGS)
def test_without_step_of_the_optimizer(ranks: Ranks, sharding: str) -> None:
    ranks.run(trains_as_unsharded, Case(tables(sharding, "sum"), ends_steps=False))
