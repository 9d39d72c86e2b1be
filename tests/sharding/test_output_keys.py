"""Outputs come in the order in which TorchRec returns those of its own tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from output_keys import output_keys
from ranks import Ranks
from sharded_models import SEQUENCE_SHARDINGS, Table

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


@pytest.mark.parametrize("pooling", ["sum", "none"])
@pytest.mark.parametrize("sharding", SEQUENCE_SHARDINGS)
def test_order(two_ranks: Ranks, sharding: str, pooling: str) -> None:
    dynamic = [
        Table("b", 8, ("y", "x"), pooling, sharding),
        Table("c", 16 if pooling == "sum" else 8, ("z", "y"), pooling, sharding),
        Table("a", 8, ("w",), pooling, sharding),
    ]
    static = [replace(table, dynamic=False) for table in dynamic]
    assert two_ranks.run(output_keys, dynamic) == two_ranks.run(output_keys, static)
