"""TorchRec's own test of sharding, with dynamic tables in place of its kernels."""

from __future__ import annotations

import pytest
from conformance import CASES, conforms
from ranks import Ranks
from sharded_models import FOUR_RANKS

SHARDINGS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise")


@pytest.mark.parametrize("kernel", ["customized_kernel", "fused"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_torchrec_s_own(
    request: pytest.FixtureRequest, sharding: str, pooling: str, case: str, kernel: str
) -> None:
    ranks: Ranks = request.getfixturevalue("four_ranks" if sharding in FOUR_RANKS else "two_ranks")
    ranks.run(conforms, sharding, pooling, case, kernel, 2)
