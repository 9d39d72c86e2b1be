"""With a process group, an id starts with the same values on every rank."""

from __future__ import annotations

import functools

import pytest
import torch
from ranks import Ranks
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.distributed.agreement import comparable

pytestmark = pytest.mark.cpu_only("several processes over gloo")


def first_rows(rank: int) -> Tensor:
    users = td.DynamicEmbedding(8, name="users", optimizer=td.SGD(lr=0.1))
    ids = torch.tensor([5, -1, 2**40]) if rank == 0 else torch.tensor([-1, 7, 2**40])
    users(ids)
    return users.group.read(0, torch.tensor([-1, 2**40]))


def test_seed_of_rank_0_on_every_rank(two_ranks: Ranks) -> None:
    """Ranks draw other random numbers, so that dropout and shuffling do."""
    first, second = two_ranks.run(first_rows)
    assert torch.equal(first, second)
    torch.manual_seed(0)  # as on rank 0
    alone = td.DynamicEmbedding(8, name="users", optimizer=td.SGD(lr=0.1))
    assert torch.equal(alone.group.read(0, torch.tensor([-1, 2**40])), first)


def test_values_are_described_alike_in_every_process() -> None:
    """Ranks compare these texts: no address is in them, and nothing of a tensor is left out."""
    ones = torch.ones(5000)
    other = ones.clone()
    other[2500] = 2
    assert comparable(ones) == comparable(ones.clone()) != comparable(other)
    assert comparable({"b": [1, 2.5], "a": (None, torch.int8)}) == (
        "{'a': [None, torch.int8], 'b': [1, 2.5]}"
    )
    assert comparable({3, 1, 2}) == "{1, 2, 3}"
    assert comparable(td.AdmitFrequent(2)) == "AdmitFrequent(threshold=2)"
    assert comparable(functools.partial(first_rows, 1)) == (
        "partial([test_ranks.first_rows, [1], {}])"
    )
    assert comparable(object()) == "builtins.object"
    assert comparable(torch.optim.Adam) == "torch.optim.adam.Adam"
