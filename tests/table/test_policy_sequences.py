"""Random lives of a small table with policies, compared with a plain model after every call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_oracle import Expected, entries_of, expected_lookup
from seeding import seeded
from whole_group import check_whole

import torch_dynemb as td
from torch_dynemb.ops.columns import DECAY_BITS, WAITING_BASE
from torch_dynemb.table.content import read_counts

pytestmark = pytest.mark.any_device

IDS = st.integers(-3, 12)
FEATURES = st.fixed_dictionaries(
    {
        "threshold": st.sampled_from([None, 1, 2, 4]),
        "ttl": st.sampled_from([None, 3, 50]),
        "updates_scores": st.sampled_from([True, True, False]),
    }
)
RULES = [
    None,
    td.AdmitFrequent(3),
    td.AdmitFrequent(3, half_life_steps=2),
    td.AdmitFrequentSketch(3, "1MB"),
]


@st.composite
def groups(draw: st.DrawFn) -> td.TableGroup:
    """One table of few rows; three features, two of which have policies of their own."""
    rule = draw(st.sampled_from(RULES))
    on_full = draw(st.sampled_from(["evict", "evict", "default", "grow"]))
    policy = td.Policy(
        score=draw(
            st.sampled_from(["step", "frequency", ("timestamp", "frequency"), ("custom", "step")])
        ),
        capacity=draw(st.sampled_from([1, 2, 4, 9])),
        on_full=on_full,
        protected_steps=draw(st.sampled_from([1, 1, 2])),
        admission=rule,
        ttl=draw(st.sampled_from([None, 10])),
    )
    own = {}
    for name in ("a", "b"):
        arguments = draw(FEATURES)
        if rule is None:
            arguments["threshold"] = None
        own[name] = td.FeaturePolicy(**arguments)
    config = td.TableConfig("t", 4, ["a", "b", "c"], policy=policy, feature_policies=own)
    group = td.TableGroup([config], optimizer=None, max_rows=100, seed=draw(st.integers(0, 3)))
    group.evicted.record(100)
    if "custom" in policy.scores:
        group.scores.set_batch(0, 7)
    return group


def look_up(group: td.TableGroup, features: list[tuple[str, list[int]]]) -> list[int]:
    """A training lookup by features of the table, in this order."""
    ids = [id for _, values in features for id in values]
    ends = torch.tensor([0, *(len(values) for _, values in features)]).cumsum(0)
    policies = [group.config.layout.of_feature.get((0, name), 0) for name, _ in features]
    given = torch.tensor(ids, dtype=torch.int64)
    if not group.config.layout.rows:
        policies = []
    handles: list[int] = group.find_or_insert(given, ends, [0] * len(features), policies).tolist()
    return handles


def counts_of(group: td.TableGroup) -> dict[int, float] | None:
    """Return the counts of ids without a row, as the oracle has them."""
    counted = read_counts(group.tables, 0)
    if counted is None:
        return None
    counts = counted.counts.double()
    if group.config.tables[0].policy.admission_ticks:
        counts = torch.exp2((counted.counts - WAITING_BASE).double() / (1 << DECAY_BITS))
    return dict(zip(counted.ids.tolist(), counts.tolist(), strict=True))


def statistics(group: td.TableGroup) -> Counter[str]:
    stats = group.usage.tables(wait=True)["t"]
    return Counter({name: getattr(stats, name) for name in ("evicted", "rejected", "not_admitted")})


def check_lookup(
    group: td.TableGroup, features: list[tuple[str, list[int]]], counts: dict[int, float]
) -> Expected:
    """Looks up and compares everything that the lookup leaves behind."""
    own = group.config.tables[0].feature_policies
    policies = [(own.get(name, td.FeaturePolicy()), ids) for name, ids in features]
    expected = expected_lookup(group, 0, policies, counts)
    before = statistics(group)
    handles = look_up(group, features)
    group.end_step()
    change = statistics(group)
    change.subtract(before)
    records = group.evicted.take()
    assert (records["t"].ids.tolist() if records else []) == expected.evicted
    assert change == {
        "evicted": len(expected.evicted),
        "rejected": expected.rejected,
        "not_admitted": expected.not_admitted,
    }
    entries = entries_of(group, 0)
    assert {id: entry.scores for id, entry in entries.items()} == expected.scores
    ids = [id for _, values in features for id in values]
    for id, handle in zip(ids, handles, strict=True):
        assert expected.handles[id] in (0, handle)
        assert handle == (entries[id].handle if id in entries else -3)
    kept = counts_of(group)
    assert kept is None or kept == pytest.approx(expected.counts, rel=1e-6)
    check_whole(group)
    return expected


def check_life(data: st.DataObject) -> None:
    """Lookups, erasures and assignments in random order."""
    group = data.draw(groups())
    policy = group.config.tables[0].policy
    timed = "expiry" in group.config.layout.score_words or "timestamp" in policy.scores
    now = 1000
    if timed:
        group.clock.set_now(now)
    counts: dict[int, float] = {}
    for _ in range(data.draw(st.integers(1, 10))):
        action = data.draw(st.sampled_from(["look up"] * 5 + ["erase", "assign"]))
        ids = data.draw(st.lists(IDS, max_size=6))
        if action == "erase":
            group.erase(0, torch.tensor(ids, dtype=torch.int64))
        elif action == "assign":
            ids = list(dict.fromkeys(ids))
            try:
                group.insert_or_assign(
                    0, torch.tensor(ids, dtype=torch.int64), torch.ones(len(ids), 4)
                )
                if isinstance(policy.admission, td.AdmitFrequent):
                    counts = {id: n for id, n in counts.items() if id not in ids}
            except RuntimeError:
                pass  # no room: nothing has been counted or forgotten
            group.evicted.take()
            kept = counts_of(group)
            assert kept is None or kept == pytest.approx(counts, rel=1e-6)
        else:
            names = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=4))
            features = [(name, data.draw(st.lists(IDS, max_size=6))) for name in names]
            counts = check_lookup(group, features, counts).counts
        if data.draw(st.booleans()):
            now += 2
            group.step(now=now if timed else None)


@settings(max_examples=25)
@given(st.data())
def test_a_small_table_lives_as_the_model_says(data: st.DataObject) -> None:
    check_life(data)


@pytest.mark.long
@settings(max_examples=500)
@given(st.data())
def test_many_small_tables_live_as_the_model_says(data: st.DataObject) -> None:
    check_life(data)


@pytest.mark.parametrize("capacity", [1, 2, 4, 64, 89])
@pytest.mark.parametrize("score", ["step", "frequency"])
def test_a_small_full_table_takes_every_new_id(capacity: int, score: Any) -> None:
    """The index is looked at as a whole: no id is refused for which another one could go."""
    policy = td.Policy(score=score, capacity=capacity)
    group = td.TableGroup([td.TableConfig("t", 4, policy=policy)], optimizer=None, seed=1)
    group.insert(0, torch.arange(capacity))
    group.step()
    generator = seeded(capacity)
    for replaced in (1, capacity, (capacity + 1) // 2, capacity) * 3:
        ids = torch.randint(1 << 20, 1 << 60, (replaced,), generator=generator)
        assert bool((group.insert(0, ids) >= 0).all())
        assert bool((group.insert(0, ids[:1] + 1) >= 0).all()) == (replaced < capacity)
        group.step()
    assert group.size(0) == capacity


def test_a_small_table_evicts_the_least_of_all_its_ids() -> None:
    policy = td.Policy(score="frequency", capacity=40)
    group = td.TableGroup([td.TableConfig("t", 4, policy=policy)], optimizer=None, seed=1)
    group.insert(0, torch.arange(40).repeat_interleave(torch.arange(40) % 10 + 1))
    group.step()
    group.insert(0, torch.arange(100, 108))
    there = group.contains(0, torch.arange(40))
    assert torch.arange(40)[~there].tolist() == [0, 1, 10, 11, 20, 21, 30, 31]
