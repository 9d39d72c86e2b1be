"""Admission by decayed occurrences, against sums of powers in floats; its states and arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from group_calls import train
from seeding import seeded
from table_ids import ids_of

import torch_dynemb as td
from torch_dynemb.ops.columns import DECAY_BITS, WAITING_BASE
from torch_dynemb.table.content import read_counts

pytestmark = pytest.mark.any_device

NOW = 1_700_000_000
DAY = 86_400


def table_of(rule: td.AdmitFrequent, **policy: Any) -> td.DynamicEmbedding:
    torch.manual_seed(1)
    table = td.DynamicEmbedding(
        4, name="users", optimizer=td.SGD(lr=0.1), policy=td.Policy(admission=rule, **policy)
    )
    if table.group.config.keeps_time:
        table.group.clock.set_now(NOW)
    return table


def daily(threshold: int = 3) -> td.AdmitFrequent:
    return td.AdmitFrequent(threshold, half_life="1d")


def look_up(table: td.DynamicEmbedding, ids: Any) -> None:
    given = torch.as_tensor(ids)
    train(table.group, 0, given, torch.zeros(given.numel(), 4))


def waiting(table: td.DynamicEmbedding) -> dict[int, float]:
    """Return the counts of ids without a row, as of now."""
    group = table.group
    stored = read_counts(group.tables, 0)
    assert stored is not None
    ticks = group.config.tables[0].policy.admission_ticks
    counts = stored.counts.double()
    if ticks != 0:
        now = group.index.clock[0 if ticks < 0 else 1].double() / abs(ticks)
        counts = torch.exp2((stored.counts - WAITING_BASE).double() / (1 << DECAY_BITS) - now)
    return dict(zip(stored.ids.tolist(), counts.tolist(), strict=True))


def test_occurrences_count_half_after_a_half_life() -> None:
    table = table_of(daily())
    look_up(table, [1, 1, 2, 2])
    assert waiting(table) == pytest.approx({1: 2.0, 2: 2.0}, rel=1e-6)
    table.group.clock.set_now(NOW + DAY)
    assert waiting(table) == pytest.approx({1: 1.0, 2: 1.0}, rel=1e-6)
    look_up(table, [1, 1, 2])
    assert ids_of(table.group) == {1}
    table.group.clock.set_now(NOW + 2 * DAY)
    look_up(table, [2])
    assert waiting(table) == pytest.approx({2: 2.0}, rel=1e-6)
    look_up(table, [2])
    assert ids_of(table.group) == {1, 2}


@pytest.mark.parametrize("half_life", [{"half_life": 37}, {"half_life_steps": 3}], ids=str)
def test_random_events_are_those_of_the_formula(half_life: dict[str, Any]) -> None:
    threshold, ids = 4, 600
    table = table_of(td.AdmitFrequent(threshold, **half_life))
    generator = seeded(3)
    exact = torch.zeros(ids, dtype=torch.float64)
    admitted = torch.zeros(ids, dtype=torch.bool)
    early = 0  # ids without a row although all their occurrences reach the threshold
    total = torch.zeros(ids)
    now = NOW
    for _ in range(30):
        given = (torch.rand(300, generator=generator) ** 3 * ids).long()
        seen = torch.bincount(given, minlength=ids)
        exact += torch.where(admitted, 0, seen)
        total += seen
        look_up(table, given)
        admitted |= (seen > 0) & (exact >= threshold * (1 - 1e-6))
        exact[admitted] = 0
        assert ids_of(table.group) == set(admitted.nonzero()[:, 0].tolist())
        early += int((~admitted & (total >= threshold)).sum())
        passed = int(torch.randint(0, 60, (), generator=generator))
        now += passed
        table.group.step(now=now if "half_life" in half_life else None)
        exact *= 2.0 ** -(passed / 37 if "half_life" in half_life else 1 / 3)
    found = waiting(table)
    expected = {id: float(exact[id]) for id in found}
    assert len(found) > 200
    assert found == pytest.approx(expected, rel=1e-5)
    assert early > 100


@pytest.mark.parametrize("threshold", [1, 2, 3, 7, 150])
def test_at_one_time_the_occurrence_of_the_threshold_admits(threshold: int) -> None:
    """One by one, and all at once: rounding of logarithms changes nothing."""
    table = table_of(daily(threshold), score="frequency")
    ids = torch.arange(threshold + 3)
    look_up(table, ids.repeat_interleave(ids))
    assert ids_of(table.group) == set(range(threshold, threshold + 3))
    found = table.group.scores.get(0, ids[threshold:]).scores.tolist()
    assert found == [threshold, threshold + 1, threshold + 2]
    for _ in range(threshold - 1):
        look_up(table, [-1])
    assert ids_of(table.group) == set(range(threshold, threshold + 3))
    look_up(table, [-1])
    assert -1 in ids_of(table.group)


def test_frequencies_begin_with_the_threshold() -> None:
    table = table_of(daily(), score=("frequency", "decayed"), half_life="1d")
    look_up(table, [1, 1, 2, 2])
    table.group.clock.set_now(NOW + DAY)
    look_up(table, [1, 1, *[2] * 5])
    ids = torch.tensor([1, 2])
    assert table.group.scores.get(0, ids).scores.tolist() == [3, 5]
    decayed = table.group.scores.get(0, ids, score="decayed").scores.tolist()
    assert decayed == pytest.approx([3.0, 5.0], rel=1e-6)


def test_an_id_without_room_keeps_its_count() -> None:
    table = table_of(daily(2), score="step", capacity=1, on_full="default")
    look_up(table, [1, 1, 2, 2, 2])
    assert ids_of(table.group) == {1}
    assert waiting(table) == pytest.approx({2: 3.0}, rel=1e-6)
    table.group.erase(0, torch.tensor([1]))
    table.group.clock.set_now(NOW + DAY)
    look_up(table, [2])
    assert ids_of(table.group) == {2}


# -- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        daily(),
        td.AdmitFrequent(3, half_life="7d"),
        td.AdmitFrequent(3, half_life_steps=100),
        td.AdmitFrequent(3),
    ],
    ids=str,
)
def test_checkpoints_keep_counts_with_another_half_life(
    tmp_path: Path, rule: td.AdmitFrequent
) -> None:
    saved = table_of(daily())
    look_up(saved, [1, 1, 2])
    saved.optimizer.step(now=NOW + DAY)
    look_up(saved, [3, 3])
    td.checkpoint.save(tmp_path / "model", saved)
    loaded = table_of(rule)
    td.checkpoint.load(tmp_path / "model", loaded)
    expected = {1: 1.0, 2: 0.5, 3: 2.0}
    if rule.half_life_ticks == 0:
        expected = {1: 1, 3: 2}  # rounded
    assert waiting(loaded) == pytest.approx(expected, rel=1e-6)


def test_whole_counts_become_decayed_ones(tmp_path: Path) -> None:
    """The saved table keeps no time, so its counts are as of the time of the other one."""
    saved = table_of(td.AdmitFrequent(3))
    look_up(saved, [1, 1, 2])
    td.checkpoint.save(tmp_path / "model", saved)
    loaded = table_of(daily())
    td.checkpoint.load(tmp_path / "model", loaded)
    assert waiting(loaded) == pytest.approx({1: 2.0, 2: 1.0}, rel=1e-6)
    look_up(loaded, [1, 2])
    assert ids_of(loaded.group) == {1}


def test_increments_carry_decayed_counts(tmp_path: Path) -> None:
    saved = table_of(daily())
    td.checkpoint.record_changes(saved)
    look_up(saved, [1, 1, 2])
    td.checkpoint.save(tmp_path / "base", saved)
    saved.optimizer.step(now=NOW + DAY)
    look_up(saved, [2, 2, 3])
    td.checkpoint.save(tmp_path / "more", saved, since=tmp_path / "base")
    td.checkpoint.merge([tmp_path / "base", tmp_path / "more"], tmp_path / "merged")
    loaded = table_of(daily())
    td.checkpoint.load(tmp_path / "merged", loaded)
    assert waiting(loaded) == waiting(saved)
    weekly = table_of(td.AdmitFrequent(3, half_life="7d"))
    td.checkpoint.record_changes(weekly)
    td.checkpoint.load(tmp_path / "base", weekly)
    with pytest.raises(td.errors.NewBaseNeededError, match="known since no checkpoint"):
        td.checkpoint.save(tmp_path / "other", weekly, since=tmp_path / "base")


def test_a_log_resumes_with_its_half_life(tmp_path: Path) -> None:
    trained = table_of(td.AdmitFrequent(3, half_life_steps=2))
    log = td.delta_log.DeltaLog(tmp_path / "log", resume=True)
    log.attach(trained)
    for ids in ([1, 1, 2], [3, 3], [2, 4]):
        look_up(trained, ids)
        trained.optimizer.step()
        log.publish()
    log.close()
    resumed = table_of(td.AdmitFrequent(3, half_life_steps=2))
    td.delta_log.resume(tmp_path / "log", resumed)
    assert waiting(resumed) == waiting(trained)
    for table in (trained, resumed):
        look_up(table, [3, 3, 2, 2, 4, 4])
    assert ids_of(resumed.group) == ids_of(trained.group) == {2, 3}
    message = "admission_half_life -2 in the log and None in the model"
    with pytest.raises(ValueError, match=message):
        td.delta_log.resume(tmp_path / "log", table_of(td.AdmitFrequent(3)))


def test_state_dicts_need_the_half_life_that_they_were_saved_with() -> None:
    saved = table_of(daily())
    look_up(saved, [1, 1, 2])
    same = table_of(daily())
    same.load_state_dict(saved.state_dict())
    assert waiting(same) == waiting(saved)
    message = "admission_half_lives = {'users': 86400}"
    with pytest.raises((ValueError, RuntimeError), match=re.escape(message)):
        table_of(td.AdmitFrequent(3)).load_state_dict(saved.state_dict())


# -- arguments -----------------------------------------------------------------------------------

RANGE = "expected from 1 to 2^32"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"half_life": 0}, ValueError, f"AdmitFrequent: half_life is 0, {RANGE}"),
        ({"half_life": -5}, ValueError, f"AdmitFrequent: half_life is -5, {RANGE}"),
        ({"half_life": (1 << 32) + 1}, ValueError, f"half_life is 4294967297, {RANGE}"),
        ({"half_life": float("nan")}, TypeError, "half_life is nan, expected seconds, or a text"),
        ({"half_life": "week"}, ValueError, "half_life is 'week', expected seconds, or a text"),
        ({"half_life_steps": 0}, ValueError, f"half_life_steps is 0, {RANGE}"),
        ({"half_life_steps": 1.5}, TypeError, "half_life_steps is 1.5, expected int"),
        ({"half_life": 5, "half_life_steps": 5}, ValueError, "decayed counts need one of them"),
    ],
)
def test_wrong_half_lives(arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        td.AdmitFrequent(2, **arguments)


@pytest.mark.parametrize("name", ["half_life", "half_life_steps"])
def test_sketches_have_no_half_life(name: str) -> None:
    message = f"AdmitFrequentSketch: {name} is 5, but cells .* give halve_every=steps, or use Admit"
    with pytest.raises(ValueError, match=message):
        td.AdmitFrequentSketch(2, "1MB", **{name: 5})
    assert repr(td.AdmitFrequentSketch(2, 64)) == (
        "AdmitFrequentSketch(threshold=2, memory=64, halve_every=None)"
    )


@pytest.mark.parametrize("late", [lambda group: group.clock.set_now, lambda group: group.step])
def test_times_beyond_the_clock_are_refused(
    late: Callable[[td.TableGroup], Callable[..., None]],
) -> None:
    group = table_of(td.AdmitFrequent(2, half_life=1)).group
    message = r"seconds is 4294967295, 2\^32 half-lives of table 'users' or more: give it a half"
    call = late(group)
    with pytest.raises(ValueError, match=message):
        call(**{"now" if call == group.step else "seconds": (1 << 32) - 1})
    assert int(group.index.clock[1]) == NOW


def test_dumps_of_dynamicemb_have_no_such_counts(tmp_path: Path) -> None:
    from torch_dynemb.migrate.dynamicemb_calls import DynamicEmbDump

    with pytest.raises(ValueError, match="DynamicEmb has no counts that decay: give counter=False"):
        DynamicEmbDump(tmp_path, table_of(daily()), counter=True)
