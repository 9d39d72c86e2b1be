"""Tables that live long, under every policy in turn."""

from __future__ import annotations

import pytest
import torch
from group_calls import train
from seeding import seeded
from whole_group import check_whole

import torch_dynemb as td
from torch_dynemb.ops.columns import BUCKET_WIDTH, BUCKET_WORDS, Meta

pytestmark = pytest.mark.any_device

DIM = 4
POLICIES = {
    "lru": td.Policy(score="step"),
    "lfu": td.Policy(score="frequency"),
    "timestamp": td.Policy(score=("timestamp", "frequency"), ttl=20),
    "frequency and timestamp": td.Policy(score=("frequency", "timestamp")),
    "custom": td.Policy(score="custom"),
    "two steps": td.Policy(score="step", protected_steps=2),
    "default": td.Policy(score="step", on_full="default"),
    "counted": td.Policy(score="frequency", admission=td.AdmitFrequent(2)),
    "sketch": td.Policy(admission=td.AdmitFrequentSketch(2, "256KB", halve_every=50)),
    "chance": td.Policy(score="frequency", admission=td.AdmitByChance(0.5)),
}


def live(policy: td.Policy, *, capacity: int, events: int, batch: int) -> None:
    """A drifting Zipf stream through a table of this capacity, with removals now and then."""
    policy = td.Policy(**{**vars(policy), "capacity": capacity})
    group = td.TableGroup(
        [td.TableConfig("t", DIM, policy=policy)], optimizer=td.Adagrad(lr=0.1), seed=1
    )
    generator = seeded(2)
    gradient = torch.ones(batch, DIM)
    distinct = 8.0 * capacity
    steps = events // batch
    for step in range(steps):
        uniform = torch.rand(batch, generator=generator)
        ids = (distinct**uniform).long() + step * capacity // steps * 4
        if "custom" in policy.scores:
            group.scores.set_batch(0, step % 7)
        train(group, 0, ids * 7919, gradient)
        group.step(now=step if "timestamp" in policy.scores or policy.ttl else None)
        if step in (steps // 3, 2 * steps // 3):
            check_whole(group)
            removed = group.remove(0, predicate=lambda ids, _: ids % 5 == 0)
            assert removed > 0
            if step > steps // 2:
                group.compact()
            check_whole(group)
    check_whole(group)
    stats = group.usage.tables(wait=True)["t"]
    assert stats.stale == 0
    assert stats.found + stats.missed == steps * batch
    assert stats.inserted == stats.size + stats.evicted + stats.removed
    assert (stats.evicted > 0) == (policy.on_full is None)
    memory = group.usage.memory()
    assert memory["rows"] + memory["state"] <= capacity * group.config.row_bytes(
        group.config.slabs[0]
    )
    if stats.counted == 0:  # exact counts grow with what has been seen
        words = BUCKET_WORDS + BUCKET_WIDTH * len(group.config.layout.score_words)
        most = 8 * words * int(group.index.meta[0, Meta.REGION_BUCKETS]) + stats.counter_bytes
        assert memory["index"] <= most + 8 * capacity


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_hundred_thousand_events(policy: td.Policy) -> None:
    live(policy, capacity=1000, events=100_000, batch=500)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_ten_million_events(policy: td.Policy) -> None:
    """All policies together: 10^8 events through tables of 10^6 rows."""
    live(policy, capacity=1_000_000, events=10_000_000, batch=50_000)
