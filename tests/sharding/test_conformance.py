"""TorchRec's own test of sharding, with dynamic tables in place of its kernels."""

from __future__ import annotations

import pytest
from conformance import CASES, conforms
from ranks import Ranks
from sharded_models import BAG_SHARDINGS, FOUR_RANKS

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


@pytest.fixture
def ranks(request: pytest.FixtureRequest, sharding: str) -> Ranks:
    """As many as the sharding type needs."""
    ranks: Ranks = request.getfixturevalue("four_ranks" if sharding in FOUR_RANKS else "two_ranks")
    return ranks


@pytest.mark.parametrize("pooling", ["sum", pytest.param("mean", marks=pytest.mark.long)])
@pytest.mark.parametrize("sharding", BAG_SHARDINGS)
@pytest.mark.parametrize("case", CASES)
def test_dynamic_tables(ranks: Ranks, sharding: str, pooling: str, case: str) -> None:
    ranks.run(conforms, sharding, pooling, case, "customized_kernel", 2)


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_tables_of_torchrec(ranks: Ranks, sharding: str) -> None:
    """What the harness says of TorchRec's own kernels."""
    ranks.run(conforms, sharding, "sum", "plain", "fused", 2)
