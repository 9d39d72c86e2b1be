"""Decayed counts against sums of powers in float64; eviction by them; other half-lives."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from group_calls import train

import torch_dynemb as td
from torch_dynemb.ops.columns import DECAY_BITS, NEVER_OCCURRED
from torch_dynemb.policy.half_life import counts_of, logarithms_of, with_half_life

pytestmark = pytest.mark.any_device

NOW = 1_700_000_000
DAY = 86_400


def make_group(policy: td.Policy, **arguments: Any) -> td.TableGroup:
    group = td.TableGroup(
        [td.TableConfig("users", 4, policy=policy)],
        **{"optimizer": td.SGD(lr=0.1), "seed": 1, **arguments},
    )
    if group.config.keeps_time:
        group.clock.set_now(NOW)
    return group


def by_days(**arguments: Any) -> td.Policy:
    return td.Policy(score="decayed", half_life="1d", **arguments)


def counts(group: td.TableGroup, ids: Any) -> list[float]:
    return group.scores.get(0, torch.tensor(ids)).scores.tolist()


def look_up(group: td.TableGroup, ids: Any) -> None:
    given = torch.as_tensor(ids)
    train(group, 0, given, torch.zeros(given.numel(), 4))


# -- counts --------------------------------------------------------------------------------------


def test_each_occurrence_counts_half_after_a_half_life() -> None:
    group = make_group(by_days())
    look_up(group, [7, 7, 7, 8])
    assert counts(group, [7, 8, 9]) == pytest.approx([3.0, 1.0, 0.0], rel=1e-6)
    group.clock.set_now(NOW + DAY)
    assert counts(group, [7, 8]) == pytest.approx([1.5, 0.5], rel=1e-6)
    look_up(group, [8, 8])
    group.clock.set_now(NOW + 2 * DAY)
    assert counts(group, [7, 8]) == pytest.approx([0.75, 1.25], rel=1e-6)


def test_half_lives_in_steps() -> None:
    group = make_group(td.Policy(score="decayed", half_life_steps=2))
    look_up(group, [1, 1])
    for _ in range(4):
        group.step()
    assert counts(group, [1]) == pytest.approx([0.5], rel=1e-6)


@pytest.mark.parametrize("half_life", [1, 37, 3600, 1 << 32])
def test_random_events_are_those_of_the_formula(half_life: int) -> None:
    """64 ids of a power law, in calls at random times; n occurrences in a call are n."""
    torch.manual_seed(half_life)
    group = make_group(td.Policy(score="decayed", half_life=half_life))
    exact = torch.zeros(64, dtype=torch.float64)
    now = NOW
    for _ in range(40):
        passed = int(torch.randint(0, 2 * min(half_life, 1 << 20) + 1, ()))
        now += passed
        exact *= 2.0 ** (-passed / half_life)
        group.clock.set_now(now)
        ids = (torch.rand(500) ** 4 * 64).long()
        exact += torch.bincount(ids, minlength=64)
        look_up(group, ids)
    found = torch.tensor(counts(group, list(range(64))), dtype=torch.float64)
    seen = exact > 1e-9
    assert int(seen.sum()) > 8
    # 2^30 units for each doubling: later, a count of less than a unit's worth is lost
    assert torch.allclose(found[seen], exact[seen], rtol=1e-4, atol=0)


@pytest.mark.long
def test_a_million_events_and_ten_million_of_one_id() -> None:
    torch.manual_seed(0)
    group = make_group(by_days())
    for _ in range(100):
        group.insert(0, torch.full((100_000,), -1))
    assert counts(group, [-1]) == pytest.approx([1e7], rel=1e-4)
    exact = torch.zeros(2000, dtype=torch.float64)
    for hour in range(200):
        group.clock.set_now(NOW + 3600 * hour)
        ids = (torch.rand(5000) ** 4 * 2000).long()
        group.insert(0, ids)
        exact = exact * 2.0 ** (-1 / 24) + torch.bincount(ids, minlength=2000)
    found = torch.tensor(counts(group, list(range(2000))), dtype=torch.float64)
    assert torch.allclose(found, exact, rtol=1e-4, atol=0)
    order = exact.argsort()
    before, after = order[:-1], order[1:]
    apart = exact[after] > exact[before] * (1 + 1e-4)
    assert int(apart.sum()) > 1000
    assert bool((found[after] > found[before])[apart].all())


def test_ids_of_features_that_update_nothing_have_never_occurred() -> None:
    table = td.TableConfig(
        "ads",
        4,
        ["clicked", "shown"],
        policy=by_days(capacity=100),
        feature_policies={"shown": td.FeaturePolicy(updates_scores=False)},
    )
    group = td.TableGroup([table], optimizer=td.SGD(lr=0.1))
    group.clock.set_now(NOW)
    policies = [group.config.layout.of_feature.get((0, name), 0) for name in table.feature_names]
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    for _ in range(2):
        group.find_or_insert(ids, offsets, [0, 0], policies)
    assert counts(group, [1, 2]) == pytest.approx([2.0, 0.0], rel=1e-6)


def test_admitted_ids_begin_with_their_counted_occurrences() -> None:
    group = make_group(by_days(admission=td.AdmitFrequent(3)))
    look_up(group, [5])
    look_up(group, [5, 5])
    assert counts(group, [5]) == pytest.approx([3.0], rel=1e-6)


def test_counts_are_set_and_removed_below() -> None:
    group = make_group(by_days())
    look_up(group, range(6))
    given = torch.tensor([0.0, 0.25, 1e-30, 7.5, 1e12, 3.0], dtype=torch.float64)
    assert group.scores.set(0, torch.arange(6), given) == 6
    assert counts(group, range(6)) == pytest.approx(given.tolist(), rel=1e-6)
    group.clock.set_now(NOW + DAY)
    assert counts(group, [3]) == pytest.approx([3.75], rel=1e-6)
    assert group.remove(0, score_below=1.6) == 4
    chosen = group.remove(0, predicate=lambda ids, scores: scores > 1e6)
    assert chosen == 1
    assert bool(group.contains(0, torch.tensor([3])).all())


# -- eviction ------------------------------------------------------------------------------------


def test_the_least_decayed_count_is_evicted() -> None:
    """Old favourites go before recent ids that came less often; the most recent one stays."""
    group = make_group(by_days(capacity=3))
    look_up(group, [1] * 9)
    group.step(now=NOW + 4 * DAY)  # 9 / 16 is left of it
    look_up(group, [2, 2, 3])
    group.step(now=NOW + 4 * DAY)
    look_up(group, [4])
    assert group.contains(0, torch.arange(1, 5)).tolist() == [False, True, True, True]
    group.step(now=NOW + 4 * DAY)
    look_up(group, [5])
    assert group.contains(0, torch.arange(2, 6)).tolist() == [True, False, True, True]


def test_without_ticks_it_is_the_order_of_frequencies() -> None:
    torch.manual_seed(0)
    batches = [(torch.rand(300) ** 3 * 400).long() for _ in range(20)]
    kept = []
    for policy in (by_days(capacity=64), td.Policy(score="frequency", capacity=64)):
        group = make_group(policy)
        for ids in batches:
            look_up(group, ids)
            group.step(**({"now": NOW} if group.config.keeps_time else {}))
        kept.append(group.contains(0, torch.arange(400)).tolist())
    assert kept[0] == kept[1]


def test_scores_of_other_tables_of_the_group() -> None:
    tables = [
        td.TableConfig("decayed", 4, policy=by_days()),
        td.TableConfig("steps", 4, policy=td.Policy(score="decayed", half_life_steps=5)),
        td.TableConfig("counted", 4, policy=td.Policy(score="frequency")),
    ]
    group = td.TableGroup(tables, optimizer=td.SGD(lr=0.1))
    for table in range(3):
        train(group, table, torch.tensor([1, 1]), torch.zeros(2, 4))
    found = [group.scores.get(t, torch.tensor([1])).scores.tolist() for t in range(3)]
    assert found == [pytest.approx([2.0]), pytest.approx([2.0]), [2]]
    with pytest.raises(ValueError, match="table 'counted' does not keep score 'decayed'"):
        group.scores.get(2, torch.tensor([1]), score="decayed")


# -- states --------------------------------------------------------------------------------------


def table_of(policy: td.Policy) -> td.DynamicEmbedding:
    torch.manual_seed(1)
    table = td.DynamicEmbedding(4, name="users", optimizer=td.SGD(lr=0.1), policy=policy)
    if table.group.config.keeps_time:
        table.group.clock.set_now(NOW)
    return table


@pytest.mark.parametrize(
    "other", [{"half_life": "7d"}, {"half_life": 60}, {"half_life_steps": 100}], ids=str
)
def test_checkpoints_keep_counts_with_another_half_life(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    saved = table_of(by_days())
    look_up(saved.group, [1, 1, 1, 2])
    saved.optimizer.step(now=NOW + DAY)
    before = counts(saved.group, [1, 2])
    td.checkpoint.save(tmp_path / "model", saved)
    same, changed = table_of(by_days()), table_of(td.Policy(score="decayed", **other))
    for loaded in (same, changed):
        td.checkpoint.load(tmp_path / "model", loaded)
        assert counts(loaded.group, [1, 2]) == pytest.approx(before, rel=1e-5)
    assert counts(same.group, [1, 2]) == before


def test_increments_carry_decayed_counts(tmp_path: Path) -> None:
    saved = table_of(by_days())
    td.checkpoint.record_changes(saved)
    look_up(saved.group, [1, 1, 1, 2])
    td.checkpoint.save(tmp_path / "base", saved)
    saved.optimizer.step(now=NOW + DAY)
    look_up(saved.group, [2, 2, 3])
    td.checkpoint.save(tmp_path / "more", saved, since=tmp_path / "base")
    td.checkpoint.merge([tmp_path / "base", tmp_path / "more"], tmp_path / "merged")
    loaded = table_of(by_days())
    td.checkpoint.load(tmp_path / "merged", loaded)
    assert counts(loaded.group, [1, 2, 3]) == counts(saved.group, [1, 2, 3])


def test_an_increment_needs_a_base_with_its_half_life(tmp_path: Path) -> None:
    """The base has logarithms of another half-life, which a merge would mix with others."""
    saved = table_of(by_days())
    look_up(saved.group, [1, 2])
    td.checkpoint.save(tmp_path / "base", saved)
    weekly = table_of(td.Policy(score="decayed", half_life="7d"))
    td.checkpoint.record_changes(weekly)
    td.checkpoint.load(tmp_path / "base", weekly)
    look_up(weekly.group, [2])
    with pytest.raises(td.errors.NewBaseNeededError, match="known since no checkpoint"):
        td.checkpoint.save(tmp_path / "more", weekly, since=tmp_path / "base")


def test_state_dicts_need_the_half_life_that_they_were_saved_with() -> None:
    saved = table_of(by_days())
    look_up(saved.group, [1, 1, 2])
    buffer = io.BytesIO()
    torch.save(saved.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer)
    same = table_of(by_days())
    same.load_state_dict(state)
    assert counts(same.group, [1, 2]) == counts(saved.group, [1, 2])
    other = table_of(td.Policy(score="decayed", half_life="2d"))
    message = "half_lives = {'users': 86400}, but this module has {'users': 172800}"
    with pytest.raises((ValueError, RuntimeError), match=re.escape(message)):
        other.load_state_dict(state)


def test_conversions() -> None:
    now = NOW / DAY
    given = torch.tensor([0.0, 1e-9, 1.0, 123.5, 1e15], dtype=torch.float64)
    stored = logarithms_of(given, now)
    assert int(stored[0]) == NEVER_OCCURRED
    assert torch.allclose(counts_of(stored, now), given, rtol=1e-8)
    weekly = with_half_life(stored, DAY, 7 * DAY, step=3, now=NOW)
    assert torch.allclose(counts_of(weekly, NOW / (7 * DAY)), given, rtol=1e-8)
    by_step = with_half_life(stored, DAY, -10, step=3, now=NOW)
    assert torch.allclose(counts_of(by_step, 0.3), given, rtol=1e-8)
    unit = math.log2(123.5) + NOW // DAY + (NOW % DAY) / DAY
    assert int(stored[3]) == pytest.approx(unit * (1 << DECAY_BITS), abs=64)


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"half_life": 0}, ValueError, "half_life is 0, expected from 1 to 2^32"),
        ({"half_life": -5}, ValueError, "half_life is -5, expected from 1 to 2^32"),
        ({"half_life": "0.1s"}, ValueError, "half_life is '0.1s', expected from 1 to 2^32"),
        ({"half_life": (1 << 32) + 1}, ValueError, "half_life is 4294967297, expected from 1"),
        ({"half_life": "week"}, ValueError, "half_life is 'week', expected seconds, or a text"),
        ({"half_life": 1.5}, TypeError, "half_life is 1.5, expected seconds, or a text"),
        ({"half_life_steps": 0}, ValueError, "half_life_steps is 0, expected from 1 to 2^32"),
        ({"half_life_steps": True}, TypeError, "half_life_steps is True, expected int"),
        ({}, ValueError, "decayed counts need one of them, such as half_life='7d'"),
        ({"half_life": 5, "half_life_steps": 5}, ValueError, "decayed counts need one of them"),
        ({"half_life": 5, "score": "step"}, ValueError, "they are for score='decayed'"),
    ],
)
def test_wrong_half_lives(arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        td.Policy(**{"score": "decayed", **arguments})


def test_times_beyond_the_clock_are_refused() -> None:
    group = make_group(td.Policy(score="decayed", half_life=1))
    message = r"seconds is 4294967295, 2\^32 half-lives of table 'users' or more: give it a half"
    with pytest.raises(ValueError, match=message):
        group.clock.set_now((1 << 32) - 1)
    assert int(group.index.clock[1]) == NOW


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.ones(1), TypeError, "scores is torch.float32, expected decayed counts as float64"),
        (torch.ones(1).double() * -1, ValueError, "scores has -1.0, expected counts from 0 on"),
        (torch.ones(1).double() * math.inf, ValueError, "scores has inf, expected counts from 0"),
        (torch.ones(2).double(), ValueError, "scores has 2 elements, expected one for each"),
    ],
    ids=str,
)
def test_wrong_counts(given: torch.Tensor, error: Any, message: str) -> None:
    group = make_group(by_days())
    look_up(group, [1])
    with pytest.raises(error, match=message):
        group.scores.set(0, torch.tensor([1]), given)
    with pytest.raises(ValueError, match=r"score_below is 0\.0, expected a count of more than 0"):
        group.remove(0, score_below=0.0)
    assert counts(group, [1]) == pytest.approx([1.0])
