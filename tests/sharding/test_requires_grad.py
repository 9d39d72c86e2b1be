"""Sharded tables of which the parameters require no gradient stay as they are."""

from __future__ import annotations

import pytest
from ranks import Ranks
from requires_grad_steps import frozen_tables_stay, stays_frozen_elsewhere

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_one_rank(one_rank: None, pooling: str) -> None:
    assert frozen_tables_stay(0, "row_wise", pooling, False) == []


@pytest.mark.parametrize(
    ("sharding", "pooling", "dedup"),
    [
        ("table_wise", "sum", False),  # a rank has the frozen table alone
        ("row_wise", "sum", True),
        ("row_wise", "none", False),
        ("column_wise", "sum", False),
    ],
)
def test_two_ranks(two_ranks: Ranks, sharding: str, pooling: str, dedup: bool) -> None:
    for wrong in two_ranks.run(frozen_tables_stay, sharding, pooling, dedup):
        assert wrong == []


@pytest.mark.long
def test_other_shards(two_ranks: Ranks) -> None:
    for wrong in two_ranks.run(stays_frozen_elsewhere):
        assert wrong == []
