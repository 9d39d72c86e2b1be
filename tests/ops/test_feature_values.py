"""Ops on values of many features."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("test_cuda_kernels compares a GPU with it")

EXTREMES = [0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63)]
words = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(EXTREMES)
divisors = st.integers(1, 2**63 - 1) | st.integers(1, 20) | st.sampled_from([2**62, 2**63 - 1])


def unsigned(word: int) -> int:
    return word % 2**64


@given(st.lists(st.tuples(st.lists(words, max_size=20), divisors), max_size=5))
def test_mod_is_the_unsigned_remainder(features: list[tuple[list[int], int]]) -> None:
    values = [torch.tensor(given_values, dtype=torch.int64) for given_values, _ in features]
    results = ops.mod(values, [divisor for _, divisor in features])
    expected = [[unsigned(word) % divisor for word in given_] for given_, divisor in features]
    assert [result.tolist() for result in results] == expected


def test_mod_keeps_shapes_and_does_large_features_in_parts() -> None:
    values = [torch.randint(0, 2**62, (3, 5000)), torch.empty(0, 4).long(), torch.tensor(17)]
    results = ops.mod(values, [1009, 3, 5])
    assert [result.shape for result in results] == [value.shape for value in values]
    assert torch.equal(results[0], values[0] % 1009)
    assert results[2].item() == 2


numbers = st.one_of(
    st.tuples(st.just(dtype), st.lists(of, max_size=12), st.lists(of, max_size=8))
    for dtype, of in (
        (torch.float32, st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.5])),
        (torch.float64, st.floats(allow_nan=False) | st.integers(-3, 3).map(float)),
        (torch.int32, st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 3)),
        (torch.int64, words | st.integers(-3, 3)),
    )
)


@given(st.lists(numbers, min_size=1, max_size=5))
def test_bucketize_counts_boundaries(features: list[tuple[torch.dtype, list, list]]) -> None:
    values = [torch.tensor(given_values, dtype=dtype) for dtype, given_values, _ in features]
    boundaries = [torch.tensor(sorted(bounds), dtype=dtype) for dtype, _, bounds in features]
    results = ops.bucketize(values, boundaries)
    for result, value, bounds in zip(results, values, boundaries, strict=True):
        expected = [sum(b <= v for b in bounds.tolist()) for v in value.tolist()]
        assert result.tolist() == expected
        assert torch.equal(result, torch.bucketize(value, bounds, right=True))


def test_bucketize_of_nan_and_shapes() -> None:
    values = torch.tensor([[float("nan")], [float("-inf")], [float("inf")]])
    bounds = torch.tensor([-1.0, 4.0])
    assert ops.bucketize([values], [bounds])[0].tolist() == [[2], [0], [2]]
    large = torch.rand(3, 5000)
    bounds = torch.rand(100).sort().values
    result = ops.bucketize([large, values], [bounds, bounds])[0]
    assert torch.equal(result, torch.bucketize(large, bounds, right=True))


hash_lists = st.lists(st.tuples(words, divisors, divisors), max_size=4)


@given(st.lists(st.tuples(st.lists(words, max_size=10), hash_lists), max_size=4))
def test_multi_hash_is_its_formula(features: list[tuple[list[int], list]]) -> None:
    values = [torch.tensor(given_values, dtype=torch.int64) for given_values, _ in features]
    parts = [[[hash_[i] for hash_ in hashes] for _, hashes in features] for i in range(3)]
    results = ops.multi_hash(values, *parts)
    for (given_values, hashes), of_feature in zip(features, results, strict=True):
        expected = [
            [value * multiplier % 2**64 % prime % buckets for value in given_values]
            for multiplier, prime, buckets in hashes
        ]
        assert [result.tolist() for result in of_feature] == expected


def test_no_features_give_nothing() -> None:
    assert ops.mod([], []) == ops.bucketize([], []) == ops.multi_hash([], [], [], []) == []
