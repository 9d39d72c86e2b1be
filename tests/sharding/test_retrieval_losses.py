"""In-batch negatives of rows that TorchRec's EmbeddingCollection has looked up."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks
from retrieval_loss_steps import in_batch

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_gradients_reach_the_rows(two_ranks: Ranks, sharding: str) -> None:
    for changed, gradient in two_ranks.run(in_batch, sharding):
        torch.testing.assert_close(changed, gradient, rtol=1e-4, atol=1e-6)
        assert bool(gradient.any())
