"""EmbeddingCollection: every sharding type trains as an unsharded collection."""

from __future__ import annotations

import pytest
from ranks import Ranks
from sharded_models import SEQUENCE_SHARDINGS, Table
from sharded_training import Case, trains_as_unsharded

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

KINDS = ("plain", "int32", "offsets", "extremes", "variable_batch", "empty_rank", "empty_bags")


def tables(sharding: str) -> tuple[Table, ...]:
    """Two features share a table; sizes divide by nothing."""
    return (
        Table("one", 8, ("a", "b"), "none", sharding, num_embeddings=1),
        Table("two", 8, ("c",), "none", sharding, num_embeddings=7),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharding", SEQUENCE_SHARDINGS)
def test_trains_as_unsharded(two_ranks: Ranks, sharding: str, kind: str) -> None:
    assert min(two_ranks.run(trains_as_unsharded, Case(tables(sharding), kind))) > 0
