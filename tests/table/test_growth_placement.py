"""Where a growth puts every id: the rule, one id after another, against what ops do in parallel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from collisions import bucket_of, fmix64, second_hash, table_salt
from execution import simd, simd_levels, threads
from group_calls import differences, snapshot

import torch_dynemb as td
from torch_dynemb.ops.columns import BUCKET_WIDTH, Table

pytestmark = pytest.mark.cpu_only("the CPU's placement; tests of CUDA compare theirs with it")


def make_group(score: Any) -> td.TableGroup:
    table = td.TableConfig("grown", 1, policy=td.Policy(score=score))
    return td.TableGroup([table], optimizer=None, max_rows=3_000_000, seed=5)


def insert_in_steps(group: td.TableGroup, ids: int, steps: int) -> None:
    """New ids in equal parts, a step of the clock each; a part of them is erased again."""
    for step, part in enumerate(torch.arange(ids).chunk(steps)):
        group.index.clock[0].fill_(step + 1)
        group.insert(0, part)
    group.erase(0, torch.arange(0, ids, 31))


def lines_of(group: td.TableGroup) -> np.ndarray:
    """Keys, stored handles and score words of all buckets: [buckets, words, slots]."""
    count = int(group.index.tables[0, Table.BUCKET_COUNT])
    words = [group.index.buckets[:count].cpu().numpy().reshape(count, 2, BUCKET_WIDTH)]
    if group.index.scores.numel() > 0:
        scores = group.index.scores[:count].cpu().numpy()
        words.append(scores.reshape(count, -1, BUCKET_WIDTH))
    return np.concatenate(words, axis=1).copy()


def grown(group: td.TableGroup, old: np.ndarray, bucket_count: int) -> np.ndarray:
    """The lines after a growth.

    Entries are taken from the last bucket down, in each from the first slot on. Those that were in
    their first buckets go to their new ones, then the others to theirs. An entry that finds it full
    goes to the second one after all others, and from there on to the buckets after it.
    """
    new = np.zeros((bucket_count, *old.shape[1:]), np.int64)
    used = np.zeros(bucket_count, np.int64)

    def put(bucket: int, entry: np.ndarray) -> bool:
        if used[bucket] == BUCKET_WIDTH:
            return False
        new[bucket, :, used[bucket]] = entry
        used[bucket] += 1
        return True

    buckets, slots = np.nonzero(old[:, 1])
    order = np.lexsort((slots, -buckets))
    buckets, slots = buckets[order], slots[order]
    entries = old[buckets, :, slots]
    first_hash = fmix64(entries[:, 0].view(np.uint64) ^ table_salt(group, 0))
    first = bucket_of(first_hash, bucket_count)
    second = bucket_of(second_hash(first_hash), bucket_count)
    at_home = bucket_of(first_hash, len(old)) == buckets
    rest = [i for i in range(len(entries)) if not (at_home[i] and put(first[i], entries[i]))]
    rest = [i for i in rest if at_home[i] or not put(first[i], entries[i])]
    rest = [i for i in rest if not put(second[i], entries[i])]
    for i in rest:
        bucket = second[i] + 1
        while not put(bucket % bucket_count, entries[i]):
            bucket += 1
    return new


@pytest.mark.parametrize("score", ["none", "step", "frequency"])
@pytest.mark.parametrize("ids", [40, 8_000])  # of the latter ranges of buckets are independent
def test_growth_by_its_rule(ids: int, score: str) -> None:
    group = make_group(score)
    insert_in_steps(group, ids, 7)
    for factor in (1.2, 1.25, 1.9, 2.5):
        old = lines_of(group)
        group.reserve(0, int(factor * 0.7 * BUCKET_WIDTH * len(old)))
        new = lines_of(group)
        assert len(new) > len(old)
        np.testing.assert_array_equal(new, grown(group, old, len(new)))


@pytest.mark.long
def test_growth_past_the_caches() -> None:
    """An index large enough for lines to be streamed; the same on all threads and instructions."""
    wanted: dict[str, torch.Tensor] = {}
    for level in simd_levels():
        for count in (1, 2, 3):
            group = make_group("step")
            with simd(level), threads(count):
                insert_in_steps(group, 500_000, 3)
                for ids in (800_000, 1_000_000, 1_700_000):
                    group.reserve(0, ids)
            handles = group.find(torch.arange(500_000), torch.tensor([0, 500_000]), [0]).handles
            known = torch.arange(500_000) % 31 != 0
            assert torch.equal(handles[known], (torch.arange(500_000) << 28 | 1)[known])
            wanted = wanted or snapshot(group)
            assert differences(snapshot(group), wanted) == []
