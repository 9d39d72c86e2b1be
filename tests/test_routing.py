"""Which shard owns an id, and which ids of a batch are the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.routing import sorted_unique_ids

EXTREMES = [0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63)]
ids_of_64_bits = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(EXTREMES)


def reference_mix(id: int) -> int:
    """splitmix64's finaliser, as it is published."""
    mask = 2**64 - 1
    x = (id + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


@given(st.lists(ids_of_64_bits, max_size=40))
def test_mix_is_splitmix64(values: list[int]) -> None:
    mixed = ops.mix_ids(torch.tensor(values, dtype=torch.int64)).tolist()
    assert mixed == [signed(reference_mix(value)) for value in values]


@given(st.lists(ids_of_64_bits, max_size=40), st.integers(1, 20))
def test_a_shard_gets_its_ids_back(values: list[int], parts: int) -> None:
    mixed = [reference_mix(value) for value in values]
    for part in range(parts):
        own = [(v, m) for v, m in zip(values, mixed, strict=True) if m % parts == part]
        quotients = torch.tensor([signed(m // parts) for _, m in own], dtype=torch.int64)
        found = ops.unmix_ids(quotients, parts=parts, part=part).tolist()
        assert found == [value for value, _ in own]


def test_multiples_are_spread_evenly() -> None:
    ids = torch.arange(10**6) * 8
    mixed = ops.mix_ids(ids)
    owners = (((mixed >> 1) & (2**63 - 1)) % 8 * 2 + (mixed & 1)) % 8
    counts = torch.bincount(owners, minlength=8).double()
    assert counts.max() / counts.mean() < 1.03


def reference_unique(groups: list[list[int]]) -> tuple[list[int], list[int], list[int]]:
    ids: list[int] = []
    offsets, inverse = [0], []
    for group in groups:
        distinct = list(dict.fromkeys(group))
        inverse += [len(ids) + distinct.index(value) for value in group]
        ids += distinct
        offsets.append(len(ids))
    return ids, offsets, inverse


def arguments(groups: list[list[int]]) -> tuple[Tensor, Tensor]:
    flat = [value for group in groups for value in group]
    lengths = torch.tensor([0, *map(len, groups)])
    return torch.tensor(flat, dtype=torch.int64), lengths.cumsum(0)


small_groups = st.lists(st.lists(st.integers(-4, 4) | ids_of_64_bits, max_size=20), max_size=6)


@given(small_groups)
def test_unique_ids_in_order_of_first_occurrence(groups: list[list[int]]) -> None:
    expected = reference_unique(groups)
    for unique in (ops.unique_ids(*arguments(groups)), sorted_unique_ids(*arguments(groups))):
        assert tuple(tensor.tolist() for tensor in unique) == expected


def test_unique_ids_of_a_large_batch() -> None:
    ids = torch.randint(0, 3000, (200_000,))
    offsets = torch.tensor([0, 150_000, 150_000, 200_000])
    unique = ops.unique_ids(ids, offsets)
    for given_part, other in zip(unique, sorted_unique_ids(ids, offsets), strict=True):
        assert torch.equal(given_part, other)
    assert torch.equal(unique.ids[unique.inverse], ids)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.mix_ids(torch.zeros(2, 2).long()), "ids has 2 dimensions, expected 1"),
        (lambda: ops.mix_ids(torch.zeros(2)), "ids has dtype float32, expected int64"),
        (
            lambda: ops.unmix_ids(torch.zeros(2).long(), parts=2, part=2),
            "part is 2, expected 0 to 1",
        ),
        (
            lambda: ops.unmix_ids(torch.zeros(2).long(), parts=0, part=0),
            "parts is 0, expected at least 1",
        ),
        (
            lambda: ops.unique_ids(torch.zeros(3).long(), torch.tensor([1, 3])),
            r"offsets\[0\] is 1, expected 0",
        ),
        (
            lambda: ops.unique_ids(torch.zeros(3).long(), torch.tensor([0, 2])),
            "the last offset is 2, expected the number of ids, 3",
        ),
        (
            lambda: ops.unique_ids(torch.zeros(3).long(), torch.tensor([0, 2, 1, 3])),
            r"offsets\[2\] is 1, less than offsets\[1\] = 2: offsets must not decrease",
        ),
        (
            lambda: ops.unique_ids(torch.zeros(0).long(), torch.zeros(0).long()),
            r"offsets is empty, expected \[groups \+ 1\]",
        ),
    ],
)
def test_errors(call, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()
