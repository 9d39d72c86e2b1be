"""Removal of ids in slices, between which the table is used."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import Table

pytestmark = pytest.mark.any_device

START = 1_700_000_000


def group_with(**policy: Any) -> td.TableGroup:
    """A group with ids 0 to 2999 in table b, last seen in steps 0 to 29."""
    tables = [td.TableConfig(name, 4, policy=td.Policy(**policy)) for name in "ab"]
    group = td.TableGroup(tables, optimizer=td.SGD(lr=0.1), seed=3)
    group.clock.set_now(START)
    for step in range(30):
        group.clock.set_now(START + 10 * step)
        group.insert("b", torch.arange(100 * step, 100 * step + 100))
        group.step()
    return group


def ids_of(group: td.TableGroup) -> set[int]:
    return {id for batch in group.export("b") for id in batch.ids.tolist()}


def test_all_slices_remove_what_one_call_removes() -> None:
    group = group_with(score="step", ttl=100)
    group.insert("a", torch.arange(50))
    weights = torch.arange(3000.0)[:, None].expand(-1, 4)
    group.insert_or_assign("b", torch.arange(3000), weights)  # seen in step 30
    group.scores.set("b", torch.arange(3000), torch.arange(3000) // 100)
    group.clock.set_now(START + 391)
    conditions: dict[str, tuple[Any, range]] = {
        "not_seen_for": (27, range(300)),  # before step 3
        "score_below": (5, range(300, 500)),
        "norm_below": (2000.0, range(500, 1000)),
        "predicate": (lambda ids, scores: (ids % 2 == 0) & (scores < 20), range(1000, 2000, 2)),
    }
    for name, (value, gone) in conditions.items():
        before = ids_of(group)
        slices = list(group.remove_in_slices("b", batch_size=150, **{name: value}))
        assert len(slices) > 5
        assert sum(slices) == len(gone)
        assert before - ids_of(group) == set(gone)
    assert group.size("a") == 50


def test_the_time_of_the_first_call_counts() -> None:
    group = group_with(ttl=100)
    group.clock.set_now(START + 200)  # those of the first 10 steps, and of the 11th, have expired
    removal = group.remove_in_slices("b", batch_size=500, expired=True)
    removed = next(removal)
    group.clock.set_now(START + 10_000)
    removed += sum(removal)
    assert removed == 1100
    assert ids_of(group) == set(range(1100, 3000))


@pytest.mark.parametrize("seed", range(3))
def test_ids_that_meet_the_condition_all_the_time_go_although_others_come(seed: int) -> None:
    draw = random.Random(seed)
    group = group_with(score="step")
    last = {id: id // 100 for id in range(3000)}  # of each id, when it was seen last
    meets = {id for id, step in last.items() if step < 20}
    rehashes = int(group.index.tables[1, Table.GROWTHS])
    removal = group.remove_in_slices("b", batch_size=64, not_seen_for=10)
    seen: set[int] = set()
    erased: set[int] = set()
    removed = 0
    for slices, removed_now in enumerate(removal, 1):
        removed += removed_now
        if slices % 7 == 0 and slices < 100:
            new = [10_000 + 1000 * slices + k for k in range(300)]
            known = draw.sample(range(3000), 5)
            group.insert("b", torch.tensor(new + known))
            seen |= {*new, *known}
            gone = draw.sample(range(3000), 5)
            group.erase("b", torch.tensor(gone))
            erased |= {*gone}
            seen -= {*gone}
            group.step()
        if slices == 50:
            group.compact()
    assert int(group.index.tables[1, Table.GROWTHS]) > rehashes + 1
    left = ids_of(group)
    assert not left & (meets - seen)
    assert left >= (set(range(2000, 3000)) | {id for id in seen if id >= 10_000}) - erased
    assert removed + len(left & set(range(2000))) + len(erased) >= 2000
    assert next(removal, 0) == 0


def test_a_removal_ends_although_every_slice_is_followed_by_a_rehash() -> None:
    group = group_with(score="step")
    slices = 0
    for slices, _ in enumerate(group.remove_in_slices("b", batch_size=8, score_below=10)):
        group.reserve("b", 4000 + 1000 * slices)
    assert 5 < slices < 15
    assert ids_of(group) == set(range(1000, 3000))


def test_slices_of_an_empty_index_are_short() -> None:
    group = group_with(score="step")
    group.clear("b")
    group.reserve("b", 100_000)
    buckets = int(group.index.tables[1, Table.BUCKET_COUNT])
    removed = list(group.remove_in_slices("b", batch_size=2000, not_seen_for=1))
    assert removed == [0] * -(-buckets // 2000)


def test_errors() -> None:
    group = group_with(score="step")
    with pytest.raises(ValueError, match=r"remove_in_slices: batch_size is 3, expected at least 4"):
        group.remove_in_slices("b", batch_size=3, score_below=1)
    with pytest.raises(ValueError, match=r"got no condition, expected one of"):
        group.remove_in_slices("b")
    with pytest.raises(ValueError, match=r"remove_in_slices: table is 'c'"):
        group.remove_in_slices("c", score_below=1)

    fails = [True]

    def every(ids: Tensor, scores: Tensor) -> Tensor:
        if fails.pop():
            raise OSError("not now")
        fails.append(False)
        return torch.ones_like(ids, dtype=torch.bool)

    def numbers() -> Iterator[int]:
        return group.remove_in_slices("b", batch_size=1000, predicate=every)

    removal = numbers()
    with pytest.raises(OSError, match="not now"):
        next(removal)
    fails.append(False)
    assert sum(removal) == 3000  # the slice of the error is not left out
    removal = numbers()
    group.add_table(td.TableConfig("c", 4))
    with pytest.raises(RuntimeError, match=r"the group has other tables .* begin a new removal"):
        next(removal)
