"""A process group: equal initial values on every rank, and no training of diverging copies."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_dynemb as td
from torch_dynemb import oneembedding, recis
from torch_dynemb.distributed.agreement import comparable
from torch_dynemb.distributed.exchange import move_rows
from torch_dynemb.distributed.ranks import rank_group

pytestmark = pytest.mark.cpu_only("several processes over gloo")


def first_rows(rank: int) -> Tensor:
    users = td.private_to_rank(td.DynamicEmbedding(8, name="users", optimizer=td.SGD(lr=0.1)))
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


def swapped_rows(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Each rank sends the other one its only value, which has the stride of a longer tensor."""
    ranks = rank_group(None)
    assert ranks is not None
    given = [
        torch.tensor([[rank, 7]], dtype=dtype)[:, :1],
        torch.tensor([rank, 7], dtype=dtype)[::2],
    ]
    to_other = [rank, 1 - rank]
    return [move_rows(values, to_other, to_other, ranks) for values in given]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool, torch.float32])
def test_a_single_row_of_any_stride_moves(two_ranks: Ranks, dtype: torch.dtype) -> None:
    for rank, (row, value) in enumerate(two_ranks.run(swapped_rows, dtype)):
        assert torch.equal(row, torch.tensor([[1 - rank]], dtype=dtype))
        assert torch.equal(value, torch.tensor([1 - rank], dtype=dtype))


IDS = torch.arange(6)
SGD = td.SGD(lr=0.1)
# tables that no other rank has, and what their lookup is given
PRIVATE: dict[str, Any] = {
    "embedding": (lambda: td.DynamicEmbedding(4, name="t", optimizer=SGD), IDS),
    "bag": (lambda: td.DynamicEmbeddingBag(4, mode="sum", name="t", optimizer=SGD), IDS[None]),
    "split": (lambda: td.DynamicEmbedding(4, name="t", optimizer=SGD, split=True), IDS),
    "bags": (
        lambda: td.DynamicEmbeddingBagCollection([td.TableConfig("t", 4)], optimizer=SGD),
        {"t": IDS[None]},
    ),
    "hash table": (lambda: recis.HashTable([4], name="t"), IDS),
}


def trains_private_rows(rank: int, kind: str, compiled: bool) -> tuple[str, int]:
    make, ids = PRIVATE[kind]
    module = make()
    lookup = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    with torch.no_grad():
        lookup(ids)
    module.eval()
    lookup(ids)
    module.train()
    try:
        lookup(ids)
    except RuntimeError as error:
        return str(error), sum(module.sizes().values())
    return "", sum(module.sizes().values())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", PRIVATE)
def test_rows_that_ranks_would_train_apart(two_ranks: Ranks, kind: str, compiled: bool) -> None:
    for message, rows in two_ranks.run(trains_private_rows, kind, compiled):
        assert "a training lookup, but the process group has 2 ranks" in message
        assert "(tables ['t'])" in message
        for remedy in ("torch_dynemb.torchrec", "recis", "oneembedding", "private_to_rank(model)"):
            assert remedy in message
        assert rows == 0


def trains_beside_a_replicated_part(rank: int, wrapper: str) -> str:
    table = td.DynamicEmbedding(4, optimizer=SGD)
    if wrapper == "ddp":
        dense: nn.Module = DistributedDataParallel(nn.Linear(4, 1))
    else:
        dense = fully_shard(nn.Linear(4, 1), mesh=init_device_mesh("cpu", (2,)))
    try:
        dense(table(IDS)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_rows_beside_a_replicated_dense_part(two_ranks: Ranks, wrapper: str) -> None:
    for message in two_ranks.run(trains_beside_a_replicated_part, wrapper):
        assert "each would train its own diverging copy" in message


def trains_shared_or_private_rows(rank: int) -> list[bool]:
    shared = oneembedding.MultiTableEmbedding(
        "shared",
        4,
        torch.float32,
        torch.int64,
        tables=[oneembedding.make_table_options(oneembedding.make_normal_initializer())],
        store_options=oneembedding.make_device_mem_store_options("unused", capacity=100),
        optimizer=SGD,
    )
    dealt = recis.HashTable([4], slice=recis.gen_slice(rank, 2))
    private = td.private_to_rank(td.DynamicEmbedding(4, optimizer=SGD))
    modules: list[Any] = [shared, dealt, private, copy.deepcopy(private)]
    return [module(IDS).requires_grad for module in modules]


def test_rows_that_ranks_share_or_are_meant_to_have_alone(two_ranks: Ranks) -> None:
    assert two_ranks.run(trains_shared_or_private_rows) == [[True] * 4] * 2


def test_a_group_that_comes_later_and_ends() -> None:
    table = td.DynamicEmbedding(4, optimizer=SGD)
    table(IDS)
    for ranks in (1, 2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            if ranks == 1:
                table(IDS)
            else:
                with pytest.raises(RuntimeError, match="has 2 ranks"):
                    table(IDS + 6)
        finally:
            dist.destroy_process_group()
    table(IDS)
    assert len(table) == 6


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
    assert comparable(td.AdmitByChance(0.5)) == "AdmitByChance(probability=0.5)"
    assert comparable(functools.partial(first_rows, 1)) == (
        "partial([test_ranks.first_rows, [1], {}])"
    )
    assert comparable(object()) == "builtins.object"
    assert comparable(torch.optim.Adam) == "torch.optim.adam.Adam"
