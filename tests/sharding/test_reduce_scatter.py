"""Sums of bags over ranks with gloo, of equal and of different batches."""

from __future__ import annotations

import pytest
import reduce_scatter_steps
from ranks import Ranks

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


@pytest.mark.parametrize("division", [True, False])
@pytest.mark.parametrize(
    ("sizes", "given"), [([4, 4], False), ([4, 4], True), ([1, 6], True), ([0, 3], True)]
)
def test_two_ranks(two_ranks: Ranks, sizes: list[int], given: bool, division: bool) -> None:
    results = two_ranks.run(reduce_scatter_steps.reduce_scatter, sizes, given, division, False)
    assert max(map(max, results)) < 1e-6


@pytest.mark.parametrize("sizes", [[2, 2, 2], [5, 1, 3]])
def test_three_ranks(three_ranks: Ranks, sizes: list[int]) -> None:
    results = three_ranks.run(reduce_scatter_steps.reduce_scatter, sizes, True, True, False)
    assert max(map(max, results)) < 1e-6


@pytest.mark.parametrize("sizes", [[4, 4], [1, 6]])
def test_encoded(two_ranks: Ranks, sizes: list[int]) -> None:
    results = two_ranks.run(reduce_scatter_steps.reduce_scatter, sizes, True, True, True)
    assert 1e-6 < max(map(max, results)) < 0.05
