"""EmbeddingBagCollection: every sharding type trains as an unsharded collection."""

from __future__ import annotations

import pytest
from jagged_batches import KINDS
from ranks import Ranks
from sharded_models import BAG_SHARDINGS, FOUR_RANKS, Table
from sharded_training import Case, trains_as_unsharded


def tables(sharding: str, pooling: str) -> tuple[Table, ...]:
    """Two features share a table; dims are mixed; sizes divide by nothing."""
    return (
        Table("one", 8, ("a", "b"), pooling, sharding, num_embeddings=1),
        Table("two", 16, ("c",), pooling, sharding, num_embeddings=7),
        Table("three", 8, ("d",), pooling, sharding, num_embeddings=7),
    )


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharding", BAG_SHARDINGS)
def test_trains_as_unsharded(
    request: pytest.FixtureRequest, sharding: str, kind: str, pooling: str
) -> None:
    ranks: Ranks = request.getfixturevalue("four_ranks" if sharding in FOUR_RANKS else "two_ranks")
    assert min(ranks.run(trains_as_unsharded, Case(tables(sharding, pooling), kind))) > 0
