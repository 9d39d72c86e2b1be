"""New rows start as TorchRec's would."""

from __future__ import annotations

import pytest
from exported_ids import initial_rows
from ranks import Ranks

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_uniform_by_the_size_in_the_config(two_ranks: Ranks, sharding: str) -> None:
    elements = [x for of_rank in two_ranks.run(initial_rows, sharding) for x in of_rank]
    assert len(elements) == 100 * 8
    assert all(abs(x) <= 0.25 for x in elements)  # sqrt(1 / 16)
    assert max(elements) > 0.2
    assert min(elements) < -0.2
