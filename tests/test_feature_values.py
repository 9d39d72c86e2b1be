"""Ops on values of many features."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dynemb import ops

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


@pytest.mark.parametrize(
    ("values", "divisors", "message"),
    [
        ([torch.tensor([1])], [0], r"mod: divisors\[0\] is 0, expected at least 1"),
        ([torch.tensor([1])] * 2, [1, -5], r"mod: divisors\[1\] is -5, expected at least 1"),
        ([torch.tensor([1])] * 2, [1], "mod: divisors has 1 entries, expected one for each of 2"),
        (
            [torch.tensor([1]), torch.tensor([1.0])],
            [1, 1],
            r"mod: values\[1\] has dtype float32, expected int64",
        ),
        (
            [torch.tensor([1]), torch.ones(2, 4).long()[:, ::2]],
            [1, 1],
            r"mod: values\[1\] is not contiguous",
        ),
    ],
)
def test_mod_refuses(values: list[torch.Tensor], divisors: list[int], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.mod(values, divisors)
