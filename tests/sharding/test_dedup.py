"""use_index_dedup: every id of a rank's batch is sent once, and nothing else changes."""

from __future__ import annotations

import pytest
from dedup_steps import Case, ids_sent, refuse_column_wise, train
from ranks import Ranks

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

OF_BOTH = ["plain", "variable batch", "empty rank"]
KINDS = [("sequence", kind) for kind in OF_BOTH]
KINDS += [("pooled", kind) for kind in (*OF_BOTH, "weighted", "unused weights", "mean")]


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
@pytest.mark.parametrize(("collection", "kind"), KINDS)
def test_same_as_without(two_ranks: Ranks, collection: str, sharding_type: str, kind: str) -> None:
    case = Case(collection, sharding_type, kind)
    for difference in two_ranks.run(train, case):
        assert difference < 1e-5


def test_tables_of_two_kernels(two_ranks: Ranks) -> None:
    for difference in two_ranks.run(train, Case("pooled", "row_wise", "two kernels")):
        assert difference < 1e-5


@pytest.mark.parametrize("collection", ["pooled", "sequence"])
def test_ids_sent(two_ranks: Ranks, collection: str) -> None:
    for sent, distinct in two_ranks.run(ids_sent, collection):
        assert sent == distinct


def test_occurrences_are_counted(two_ranks: Ranks) -> None:
    for collection in ("pooled", "sequence"):
        case = Case(collection, "row_wise", "counted")
        for difference in two_ranks.run(train, case):
            assert difference < 1e-5


def test_other_shardings_are_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run(refuse_column_wise):
        assert message == (
            "EmbeddingBagCollection with use_index_dedup: table 'ads' has sharding_type "
            "'column_wise', expected one of ['row_wise', 'table_wise']"
        )
