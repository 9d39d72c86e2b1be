"""Feature processors of TorchRec around collections with dynamic tables, against static tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processor_steps import refused, trained, weights_refused
from ranks import Ranks

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


def test_position_weights_learn_as_with_static_tables(two_ranks: Ranks, tmp_path: Path) -> None:
    static = two_ranks.run(trained, "table_wise", False, "")
    for sharding in ("table_wise", "row_wise", "column_wise"):
        for values, expected in zip(
            two_ranks.run(trained, sharding, True, str(tmp_path)), static, strict=True
        ):
            for value, other in zip(values, expected, strict=True):
                torch.testing.assert_close(torch.tensor(value), torch.tensor(other))


@pytest.mark.usefixtures("one_rank")
def test_they_learn_on_one_rank(tmp_path: Path) -> None:
    for value, other in zip(
        trained(0, "row_wise", True, str(tmp_path)),
        trained(0, "table_wise", False, ""),
        strict=True,
    ):
        torch.testing.assert_close(torch.tensor(value), torch.tensor(other))


@pytest.mark.parametrize(
    ("sharding", "options", "message"),
    [
        (
            "table_wise",
            {"processed": False},
            "ValueError: sharders has none of 'bags', a FeatureProcessedEmbeddingBagCollection "
            "with dynamic tables ['table_a', 'table_b'], but without one its processors get no "
            "gradients: give FeatureProcessedEmbeddingBagCollectionSharder(sharder)",
        ),
        (
            "row_wise",
            {"use_index_dedup": True},
            "NotImplementedError: FeatureProcessedEmbeddingBagCollectionSharder: the "
            "DynamicEmbeddingBagCollectionSharder in it has use_index_dedup",
        ),
        (
            "row_wise",
            {"pooling": "MEAN"},
            "NotImplementedError: EmbeddingBagCollection: ['pooling=MEAN in a by-rows sharding'] "
            "need the weights of ids before ranks exchange them",
        ),
    ],
)
def test_refused(two_ranks: Ranks, sharding: str, options: dict[str, Any], message: str) -> None:
    for raised in two_ranks.run(refused, sharding, options):
        assert raised.startswith(message)


def test_weights_of_batches_are_checked_on_all_ranks(two_ranks: Ranks) -> None:
    for missing, learned in two_ranks.run(weights_refused):
        assert "features has no weights, but is_weighted is True: give weights=" in missing
        assert "weights of features require a gradient, but those that ranks exchange" in learned
