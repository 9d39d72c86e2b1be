"""GradScaler beside tables that ranks share: one rank's infinity is that of all of them."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks
from scaled_rank_steps import KINDS, scaled_steps

pytestmark = pytest.mark.cpu_only("several processes over gloo")


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_skip_the_same_steps(two_ranks: Ranks, kind: str) -> None:
    alone = scaled_steps(0, kind)
    assert alone["scales"] == [32.0, 32.0, 64.0, 32.0, 32.0]
    results = two_ranks.run(scaled_steps, kind)
    for of in results:
        assert of["scales"] == alone["scales"]
    rows = {id: row for of in results for id, row in of["content"].items()}
    assert rows.keys() == alone["content"].keys()
    for id, row in rows.items():
        torch.testing.assert_close(row, alone["content"][id], rtol=1e-5, atol=1e-6)
