"""Growth: the index is rehashed, rows stay where they are, memory follows what is used."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from collisions import ids_in_first_buckets
from execution import threads
from group_calls import differences, snapshot, train
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import BUCKET_WIDTH, MAX_LOAD_PERCENT, Table

pytestmark = pytest.mark.any_device

FIRST_BUCKETS = 64 // BUCKET_WIDTH


def make_group(max_rows: int, dim: int = 4, *, score: Any = "none") -> td.TableGroup:
    table = td.TableConfig("grown", dim, policy=td.Policy(score=score))
    optimizer = td.Adagrad(lr=0.1)
    return td.TableGroup([table], optimizer=optimizer, max_rows=max_rows, seed=5)


def resident_bytes(tensor: Tensor) -> int:
    """Memory behind a tensor: its pages that are present, as the kernel's pagemap says."""
    page = os.sysconf("SC_PAGE_SIZE")
    first = tensor.data_ptr() // page
    last = -(-(tensor.data_ptr() + tensor.nbytes) // page)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * (last - first)), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * page


def reserved_tensors(group: td.TableGroup) -> list[Tensor]:
    return [
        group.index.buckets,
        group.index.free_rows,
        *group.rows.weights,
        *group.rows.generations,
        *group.rows.state,
    ]


def bucket_count(group: td.TableGroup) -> int:
    return int(group.index.tables[0, Table.BUCKET_COUNT])


def test_many_growths_move_nothing_and_memory_follows() -> None:
    group = make_group(max_rows=600_000, dim=8)
    addresses = [tensor.data_ptr() for tensor in reserved_tensors(group)]
    handles = group.insert(0, torch.arange(40))
    ids, growths = 40, 0
    slack = 8 << 20  # huge pages at the end of each tensor, and the first 4 MiB
    while growths < 21:
        more = torch.arange(ids, ids + max(1, ids // 5))
        handles = torch.cat([handles, group.insert(0, more)])
        train(group, 0, more[:100], torch.ones(len(more[:100]), 8))
        ids += len(more)
        growths = int(group.index.tables[0, Table.GROWTHS])
        used = group.usage.memory()
        assert resident_bytes(group.index.buckets) <= used["index"] + slack
        assert sum(map(resident_bytes, reserved_tensors(group))) <= used["total"] + 4 * slack
    assert 100_000 < ids < 600_000
    found = group.find(torch.arange(ids), torch.tensor([0, ids]), [0]).handles
    assert torch.equal(found, handles)
    assert torch.equal(handles, torch.arange(ids) << 28 | 1)
    assert [tensor.data_ptr() for tensor in reserved_tensors(group)] == addresses


def test_unused_reservation_takes_no_memory() -> None:
    group = td.TableGroup([td.TableConfig("huge", 64)], optimizer=td.Adam(lr=0.1), seed=1)
    assert group.rows.weights[0].nbytes > 1 << 30
    small = make_group(max_rows=1000, dim=64)  # a GPU's kernels are loaded when they first run
    train(small, 0, torch.arange(100), torch.ones(100, 64))
    before = psutil.Process().memory_info().rss
    train(group, 0, torch.arange(100), torch.ones(100, 64))
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_growth_inside_one_call() -> None:
    """64 slots to 262,144 in one op; the same state as with growths on the way or ahead."""
    ids = 262_144 * MAX_LOAD_PERCENT // 100
    at_once = make_group(max_rows=ids)
    assert bucket_count(at_once) * BUCKET_WIDTH == 64
    handles = at_once.insert(0, torch.arange(ids))
    assert bucket_count(at_once) * BUCKET_WIDTH == 262_144
    assert at_once.index.tables[0, Table.GROWTHS] == 1
    assert torch.equal(handles, torch.arange(ids) << 28 | 1)
    assert torch.equal(at_once.insert(0, torch.arange(ids)), handles)
    by_parts = make_group(max_rows=ids)
    for part in torch.arange(ids).split(1000):
        by_parts.insert(0, part)
    assert torch.equal(by_parts.insert(0, torch.arange(ids)), handles)
    reserved = make_group(max_rows=ids)
    reserved.reserve(0, ids)
    reserved.insert(0, torch.arange(ids))
    reserved.insert(0, torch.arange(ids))
    reserved.index.tables[0, Table.GROWTHS] = 1
    assert differences(snapshot(reserved), snapshot(at_once)) == []


@pytest.mark.parametrize("score", ["none", "step"])
@pytest.mark.parametrize("count", [1, 2])
def test_growth_keeps_displaced_ids(count: int, score: str) -> None:
    """Ids that share a first bucket before and after the growth, among others."""
    group = make_group(max_rows=50_000, score=score)
    same = ids_in_first_buckets(group, 0, 300, buckets=1, bucket_count=1 << 30)
    with threads(count):
        handles = []
        for step, part in enumerate([same[:100], torch.arange(9000), same[100:]]):
            group.index.clock[0].fill_(step)
            handles.append(group.insert(0, part))
        for ids in (20_000, 30_000, 50_000):
            group.reserve(0, ids)
            everything = torch.cat([same[:100], torch.arange(9000), same[100:]])
            found = group.find(everything, torch.tensor([0, len(everything)]), [0]).handles
            assert torch.equal(found, torch.cat(handles))
    scores = {}
    for batch in group.export(0):
        scores.update(zip(batch.ids.tolist(), batch.scores.tolist(), strict=True))
    steps = [0] * 100 + [1] * 9000 + [2] * 200
    expected = steps if score == "step" else [0] * len(steps)
    assert [scores[id] for id in everything.tolist()] == expected


def test_growth_drops_tombstones() -> None:
    group = make_group(max_rows=5000)
    group.insert(0, torch.arange(44))
    group.erase(0, torch.arange(40))
    assert group.index.tables[0, Table.TOMBSTONES] > 0
    group.reserve(0, 1000)
    assert group.index.tables[0, Table.TOMBSTONES] == 0
    assert group.contains(0, torch.arange(44)).tolist() == [False] * 40 + [True] * 4


@pytest.mark.parametrize("score", ["none", "step"])
@pytest.mark.parametrize("ids", [40, 20_000])
def test_rehash_for_tombstones_keeps_ids(ids: int, score: str) -> None:
    """Where tombstones are too many, ids are placed again in as many buckets."""
    group = make_group(max_rows=2 * ids, score=score)
    group.reserve(0, ids)
    buckets = bucket_count(group)
    index = group.index
    handles = dict(zip(range(ids), group.insert(0, torch.arange(ids)).tolist(), strict=True))
    steps = dict.fromkeys(handles, 0)
    growths = int(index.tables[0, Table.GROWTHS])
    new = torch.arange(ids)
    rehashes = 0
    for step in range(1, 40):
        index.clock[0].fill_(step)
        gone = torch.tensor(sorted(handles)[: ids // 4])
        group.erase(0, gone)
        for id in gone.tolist():
            del handles[id], steps[id]
        new = new[-1] + 1 + torch.arange(ids // 4)
        tombstones = int(index.tables[0, Table.TOMBSTONES])
        handles.update(zip(new.tolist(), group.insert(0, new).tolist(), strict=True))
        steps.update(dict.fromkeys(new.tolist(), step))
        if int(index.tables[0, Table.GROWTHS]) == growths + rehashes:
            continue
        rehashes += 1
        assert tombstones > 0
        assert index.tables[0, Table.TOMBSTONES] == 0
        known = torch.tensor(sorted(handles))
        found = group.find(known, torch.tensor([0, ids]), [0]).handles
        assert found.tolist() == [handles[id] for id in known.tolist()]
        assert not group.contains(0, gone).any()
        stored = index.buckets[:, BUCKET_WIDTH:]
        assert int((stored[:buckets] != 0).sum()) == ids
        for batch in group.export(0):
            expected = [steps[id] if score == "step" else 0 for id in batch.ids.tolist()]
            assert batch.scores.tolist() == expected
    assert rehashes > 0
    assert bucket_count(group) == buckets


def test_bucket_counts_do_not_depend_on_the_order_of_ids() -> None:
    groups = [make_group(max_rows=50_000) for _ in range(2)]
    ids = torch.arange(20_000)
    for part in range(0, 20_000, 500):
        groups[0].insert(0, ids[part : part + 500])
        groups[1].insert(0, ids.flip(0)[part : part + 500])
        assert bucket_count(groups[0]) == bucket_count(groups[1])


def test_growth_by_a_constant_factor() -> None:
    """Growth is by about 1.45, so at least 46 % of the slots are used right after it."""
    group = make_group(max_rows=400_000)
    counts = [bucket_count(group)]
    for part in torch.arange(190_000).split(100):
        group.insert(0, part)
        if bucket_count(group) != counts[-1]:
            counts.append(bucket_count(group))
    large = [count for count in counts if count >= 1024]
    assert len(large) > 10
    for before, after in itertools.pairwise(large):
        assert 1.4 < after / before < 1.52
    assert counts[0] == FIRST_BUCKETS
