"""Which shard owns an id, and which ids of a batch are the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("test_cuda_kernels compares a GPU with it")

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


def reference_unique(groups: list[list[int]]) -> tuple[list[int], list[int], list[int], list[int]]:
    ids: list[int] = []
    counts: list[int] = []
    offsets, inverse = [0], []
    for group in groups:
        distinct = list(dict.fromkeys(group))
        inverse += [len(ids) + distinct.index(value) for value in group]
        ids += distinct
        counts += [group.count(value) for value in distinct]
        offsets.append(len(ids))
    return ids, offsets, inverse, counts


def arguments(groups: list[list[int]]) -> tuple[Tensor, Tensor]:
    flat = [value for group in groups for value in group]
    lengths = torch.tensor([0, *map(len, groups)])
    return torch.tensor(flat, dtype=torch.int64), lengths.cumsum(0)


small_groups = st.lists(st.lists(st.integers(-4, 4) | ids_of_64_bits, max_size=20), max_size=6)


@given(small_groups)
def test_unique_ids_in_order_of_first_occurrence(groups: list[list[int]]) -> None:
    ids, offsets, inverse, counts = reference_unique(groups)
    unique = ops.unique_ids(*arguments(groups))
    assert tuple(tensor.tolist() for tensor in unique) == (ids, offsets, inverse, counts)
    padded = ops.unique_ids(*arguments(groups), padded=True)
    rest = [0] * (len(inverse) - len(ids))
    expected = (ids + rest, offsets, inverse, counts + rest)
    assert tuple(tensor.tolist() for tensor in padded) == expected


def test_unique_ids_of_a_large_batch() -> None:
    ids = torch.randint(0, 3000, (200_000,))
    offsets = torch.tensor([0, 150_000, 150_000, 200_000])
    unique = ops.unique_ids(ids, offsets)
    assert torch.equal(unique.ids[unique.inverse], ids)
    assert torch.equal(unique.counts, torch.bincount(unique.inverse))
    first = torch.full_like(unique.ids, len(ids))
    first = first.scatter_reduce(0, unique.inverse, torch.arange(len(ids)), "amin")
    assert bool((first.diff() > 0).all())
    sizes = [len(part.unique()) for part in ids.tensor_split(offsets[1:-1])]
    assert unique.offsets.diff().tolist() == sizes


def reference_owner(id: int, parts: int, slots: int) -> int:
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + slots // parts + (part < slots % parts))
    slot = reference_mix(id) % slots
    return next(part for part in range(parts) if slot < bounds[part + 1])


slots_and_parts = st.sampled_from([1, 2, 7, 100, 65536, 2**40]).flatmap(
    lambda slots: st.tuples(st.just(slots), st.integers(1, min(slots, 40)))
)


@given(st.lists(ids_of_64_bits, max_size=30), slots_and_parts)
def test_owners_have_contiguous_slots(values: list[int], sizes: tuple[int, int]) -> None:
    slots, parts = sizes
    ids = torch.tensor(values, dtype=torch.int64)
    owners = ops.id_owners(ids, parts=parts, slots=slots).tolist()
    assert owners == [reference_owner(value, parts, slots) for value in values]


def test_owners_are_even() -> None:
    counts = torch.bincount(ops.id_owners(torch.arange(300_000) * 4 - 600_000, parts=3)).double()
    assert counts.max() / counts.mean() < 1.02


@given(small_groups, slots_and_parts)
def test_partition_is_unique_ids_by_owner(groups: list[list[int]], sizes: tuple[int, int]) -> None:
    slots, parts = sizes
    ids, offsets, inverse, counts = reference_unique(groups)
    group_of = [g for g in range(len(groups)) for _ in range(offsets[g], offsets[g + 1])]
    owner = [reference_owner(value, parts, slots) for value in ids]
    order = sorted(range(len(ids)), key=lambda i: (owner[i], group_of[i], i))
    place = {old: new for new, old in enumerate(order)}
    partition = ops.ids_partition(*arguments(groups), parts=parts, slots=slots)
    assert partition.ids.tolist() == [ids[i] for i in order]
    assert partition.counts.tolist() == [counts[i] for i in order]
    assert partition.inverse.tolist() == [place[i] for i in inverse]
    assert partition.lengths.tolist() == [
        [
            sum(owner[i] == p and group_of[i] == g for i in range(len(ids)))
            for g in range(len(groups))
        ]
        for p in range(parts)
    ]


def test_partition_of_a_large_batch() -> None:
    ids = torch.randint(-3000, 3000, (100_000,))
    offsets = torch.tensor([0, 60_000, 60_000, 100_000])
    partition = ops.ids_partition(ids, offsets, parts=4)
    assert torch.equal(partition.ids[partition.inverse], ids)
    owners = ops.id_owners(partition.ids, parts=4)
    assert torch.equal(owners, torch.arange(4).repeat_interleave(partition.lengths.sum(1)))
    assert int(partition.counts.sum()) == len(ids)


@given(
    st.lists(st.tuples(st.lists(ids_of_64_bits, max_size=10), st.integers(-2, 2)), max_size=5),
)
def test_encoded_ids(features: list[tuple[list[int], int]]) -> None:
    ids = [torch.tensor(values, dtype=torch.int64) for values, _ in features]
    encoded = ops.ids_encode(ids, [table for _, table in features]).tolist()
    pairs = [(table, value) for values, table in features for value in values]
    mask = 2**64 - 1
    assert encoded == [
        signed(reference_mix((value & mask) ^ reference_mix(table))) for table, value in pairs
    ]
    assert len(set(encoded)) == len(set(pairs))
