"""EmbeddingBagCollection: every sharding type trains as an unsharded collection."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jagged_batches import KINDS, OTHER_VBE
from ranks import Ranks
from sharded_models import BAG_SHARDINGS, FOUR_RANKS, Table
from sharded_training import Case, trains_as_unsharded

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


# axes of matrix/torchrec_space.py, which has pairs of them in short tests
AXES = ("weighted", "int32", "offsets", "empty_rank", "empty_bags", "weighted_vbe")
COMBINATIONS = [
    pytest.param(
        kind,
        pooling,
        # what is sent and stored is the same for both poolings
        marks=pytest.mark.long if kind in AXES or (kind, pooling) == ("extremes", "mean") else (),
    )
    for kind in KINDS
    for pooling in ("sum", "mean")
]


@pytest.mark.parametrize(("kind", "pooling"), COMBINATIONS)
@pytest.mark.parametrize("sharding", BAG_SHARDINGS)
def test_trains_as_unsharded(ranks: Ranks, sharding: str, kind: str, pooling: str) -> None:
    case = Case(tables(sharding, pooling), kind)
    assert min(ranks.run(trains_as_unsharded, case)) > 0


@pytest.mark.parametrize("kind", OTHER_VBE)
@pytest.mark.parametrize("sharding", BAG_SHARDINGS)
def test_batch_sizes_per_feature(ranks: Ranks, sharding: str, kind: str) -> None:
    assert min(ranks.run(trains_as_unsharded, Case(tables(sharding, "mean"), kind))) > 0


@pytest.mark.parametrize("kind", ["plain", "vbe"])
def test_a_node_without_tables(four_ranks: Ranks, kind: str) -> None:
    four_ranks.run(trains_as_unsharded, Case(tables("table_row_wise", "mean")[:1], kind))


@pytest.mark.parametrize("kind", ["vbe", "weighted_vbe"])
def test_a_grid_beside_other_shardings(four_ranks: Ranks, kind: str) -> None:
    one, two, three = tables("grid_shard", "mean")
    mixed = (replace(three, sharding="row_wise"), one, replace(two, sharding="column_wise"))
    four_ranks.run(trains_as_unsharded, Case(mixed, kind))
