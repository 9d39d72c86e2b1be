"""Dynamic tables in TorchRec's pipeline after a wrong batch, with quantized communication, in eval
mode.
"""

from __future__ import annotations

import pytest
from pipeline_steps import losses, modes, quantized, refused, sizes
from ranks import Ranks

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


@pytest.mark.parametrize("dedup", [False, True])
def test_a_pipeline_goes_on_after_a_batch_that_a_rank_refuses(
    two_ranks: Ranks, dedup: bool
) -> None:
    plain = two_ranks.run(losses, dedup)
    for scores, (found, errors) in zip(plain, two_ranks.run(refused, dedup), strict=True):
        assert found == pytest.approx(scores, rel=1e-5)
        assert len(errors) == 2
        for error in errors:
            assert error.startswith(
                "rank 1: EmbeddingBagCollection: ids of features ['ad', 'user', 'country'] have "
                "dtype torch.float64, expected int64 or int32"
            )


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize(("precision", "relative"), [("FP16", 2e-2), ("BF16", 1e-1), ("INT8", 0.2)])
def test_quantized_communication(
    two_ranks: Ranks, precision: str, relative: float, dedup: bool
) -> None:
    for largest, size in two_ranks.run(quantized, precision, dedup):
        assert 0 < largest < relative * size


def test_lookups_follow_the_mode_of_the_model(two_ranks: Ranks) -> None:
    for training, reading, untouched, inserted in two_ranks.run(modes):
        assert all(training)
        assert not any(reading)
        assert untouched == 0
        assert inserted > 0


def test_sizes_of_tables_over_all_ranks(two_ranks: Ranks) -> None:
    for found, distinct in two_ranks.run(sizes):
        assert found == {
            "pooled.ads": distinct["ad"],
            "pooled.users": distinct["user"],
            "sequence.history": distinct["ad"],
        }
