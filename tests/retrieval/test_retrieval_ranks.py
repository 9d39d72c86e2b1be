"""Losses over tables that ranks share, and what is not built for them."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks
from retrieval_steps import shared_items

pytestmark = pytest.mark.cpu_only("several processes over gloo")


def test_in_batch_negatives_of_a_shared_table(two_ranks: Ranks) -> None:
    for of in two_ranks.run(shared_items):
        torch.testing.assert_close(of["changed"], of["gradient"], rtol=1e-4, atol=1e-6)
        assert bool(of["gradient"].any())
        for refused in ("correction", "negatives"):
            assert "ranks share table 'items'" in of[refused]
            assert "negatives=InBatchNegatives() and correction=None" in of[refused]
        assert "'items' are on several ranks" in of["full"]
        torch.testing.assert_close(*of["top_k"])
        assert "ranks share table 'items'" in of["vectors"]
