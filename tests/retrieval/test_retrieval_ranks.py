"""Losses over tables that ranks share, and what is not built for them."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks
from retrieval_steps import engine_items, oneembedding_items, shared_items

pytestmark = pytest.mark.cpu_only("several processes over gloo")


def test_in_batch_negatives_of_a_shared_table(two_ranks: Ranks) -> None:
    for of in two_ranks.run(shared_items):
        torch.testing.assert_close(of["changed"], of["gradient"], rtol=1e-4, atol=1e-6)
        assert bool(of["gradient"].any())
        for refused in ("correction", "negatives"):
            assert "ranks share table 'items'" in of[refused]
            assert "negatives=InBatchNegatives() and correction=None" in of[refused]
        assert "'items' are on several ranks" in of["full"]
        assert "('items', 'dot'), but rank 1 ('items', 'cosine'): call it" in of["metrics"]
        torch.testing.assert_close(*of["top_k"])
        assert "ranks share table 'items'" in of["vectors"]


def test_items_of_an_engine(two_ranks: Ranks) -> None:
    for of in two_ranks.run(engine_items):
        torch.testing.assert_close(of["changed"], of["gradient"], rtol=1e-4, atol=1e-6)
        assert bool(of["gradient"].any())
        torch.testing.assert_close(*of["top_k"])
        assert "look rows up by the module that exchanges them" in of["loss"]


def test_searches_of_an_embedding_with_several_tables(two_ranks: Ranks) -> None:
    for found, expected in two_ranks.run(oneembedding_items):
        torch.testing.assert_close(found, expected)
