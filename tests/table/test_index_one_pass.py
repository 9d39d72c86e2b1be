"""Insertion in one pass, which one thread makes where there is room for all ids of a call.

It gives the integers of the rounds that two threads make, in every tensor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collisions import ids_in_first_buckets, ids_in_one_bucket
from execution import simd, simd_levels, threads
from group_calls import Call, call_of, differences, snapshot
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import Slab, Table

pytestmark = pytest.mark.cpu_only("threads of the CPU")

PADDING = 77
LARGE = 6000  # ids of a feature: two threads share a call of so many


def make_group(score: Any = "step") -> td.TableGroup:
    """Tables a and b give out rows of one slab."""
    policy = td.Policy(score=score)
    tables = [
        td.TableConfig("a", 4, policy=policy),
        td.TableConfig("b", 4, policy=policy, padding_idx=PADDING),
        td.TableConfig("c", 8, policy=policy),
    ]
    group = td.TableGroup(tables, optimizer=None, max_rows=200_000, seed=9)
    for table in range(3):
        group.reserve(table, 30_000)
    return group


def insert(group: td.TableGroup, call: Call, count: int) -> Tensor:
    with threads(count):
        return group.find_or_insert(call.ids, call.offsets, call.tables)


def both(one: td.TableGroup, rounds: td.TableGroup, features: list[tuple[int, Tensor]]) -> Tensor:
    """The same call in one pass and in rounds; handles."""
    call = call_of(one, [(table, [ids.tolist()]) for table, ids in features])
    handles = insert(one, call, 1)
    assert torch.equal(handles, insert(rounds, call, 2))
    assert differences(snapshot(one), snapshot(rounds)) == []
    return handles


def growths(group: td.TableGroup) -> list[int]:
    return group.index.tables[:, Table.GROWTHS].tolist()


@pytest.mark.parametrize("score", ["none", "step"])
def test_ids_new_known_repeated_and_padding(score: str) -> None:
    """Repeated in a block of ids, in a feature and between features of one table."""
    one, rounds = make_group(score), make_group(score)
    before = growths(one)
    generator = seeded(4)
    for step in range(3):
        for group in (one, rounds):
            group.index.clock[0].fill_(step)
        some = [torch.randint(9000, (LARGE,), generator=generator) for _ in range(4)]
        some[0][1::2] = some[0][::2]
        some[1][::7] = PADDING
        some[2][:3] = torch.tensor([0, -1, 0])
        handles = both(one, rounds, list(zip((0, 1, 0, 2), some, strict=True)))
        assert handles[:LARGE:2].tolist() == handles[1:LARGE:2].tolist()
    assert growths(one) == before
    assert int(one.index.tables[1, Table.FOUND]) > 0


@pytest.mark.parametrize("kind", ["range", "bucket"])
def test_ids_without_room_in_their_first_buckets(kind: str) -> None:
    """They wait until all others have a place, and are known meanwhile."""
    one, rounds = make_group(), make_group()
    buckets = int(one.index.tables[0, Table.BUCKET_COUNT])
    if kind == "range":
        pool = ids_in_first_buckets(one, 0, 3000, buckets=buckets // 64, bucket_count=buckets)
    else:
        pool = ids_in_one_bucket(one, 0, 60, bucket_count=buckets)
    generator = seeded(5)
    for _ in range(2):
        crowded = pool[torch.randint(len(pool), (LARGE,), generator=generator)]
        others = torch.randint(5000, (LARGE,), generator=generator)
        mixed = torch.stack([crowded, others], dim=1).flatten()
        both(one, rounds, [(0, mixed), (0, crowded.flip(0)), (1, others)])


def test_tombstones_are_taken_up() -> None:
    one, rounds = make_group(), make_group()
    first = torch.arange(28_000)
    both(one, rounds, [(0, first)])
    for group in (one, rounds):
        group.erase(0, first[::3])
    tombstones = int(one.index.tables[0, Table.TOMBSTONES])
    assert tombstones > 500
    # rows that were given back are taken up in rounds, until there are none
    both(one, rounds, [(0, torch.arange(100_000, 100_000 + len(first[::3])))])
    assert one.index.slabs[:, Slab.FREE_COUNT].tolist() == [0, 0]
    left = int(one.index.tables[0, Table.TOMBSTONES])
    assert 0 < left < tombstones
    both(one, rounds, [(0, torch.arange(200_000, 202_000)), (2, torch.arange(3000))])
    assert int(one.index.tables[0, Table.TOMBSTONES]) <= left


def test_every_instruction_set() -> None:
    ids = torch.randint(20_000, (LARGE,), generator=seeded(6))
    results = []
    for level in simd_levels():
        group = make_group()
        call = call_of(group, [(0, [ids.tolist()]), (2, [ids[:11].tolist()])])
        with simd(level):
            handles = insert(group, call, 1)
        results.append(snapshot(group) | {"handles": handles})
    assert all(differences(results[0], other) == [] for other in results[1:])


def test_calls_that_might_not_fit_are_refused_only_when_they_do_not() -> None:
    """One pass needs room for all ids of a call; the error is about those that are new."""
    table = td.TableConfig("a", 4)
    group = td.TableGroup([table], optimizer=None, max_rows=100, seed=9)
    group.reserve(0, 100)
    ids = torch.arange(90).repeat(4)
    call = call_of(group, [(0, [ids.tolist()])])
    handles = insert(group, call, 1)
    assert handles[:90].tolist() == handles[90:180].tolist()
    before = snapshot(group)
    many = call_of(group, [(0, [list(range(80, 130))])])
    with pytest.raises(RuntimeError, match="larger max_rows"):
        insert(group, many, 1)
    assert set(differences(before, snapshot(group))) <= {"scores"}


@pytest.mark.parametrize("known", [0, 6_000, 15_000])
def test_one_of_two_threads_inserts_what_three_would(known: int) -> None:
    """A call of 20,000 ids, of which so many are known: where few are, one thread makes a pass."""
    groups = make_group(), make_group()
    new = torch.arange(20_000)
    for group, count in zip(groups, (2, 3), strict=True):
        insert(group, call_of(group, [(0, [new[:known].tolist()])]), count)
        insert(group, call_of(group, [(0, [new.tolist()]), (2, [new[:100].tolist()])]), count)
    assert differences(snapshot(groups[0]), snapshot(groups[1])) == []
    assert groups[0].size(0) == 20_000
