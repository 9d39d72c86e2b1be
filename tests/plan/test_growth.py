"""Distinct ids: counts in bounded memory, and how many there will be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from extrapolations import counted, trials
from generated_streams import STREAMS, zipf

from torch_dynemb.plan.counting import IdCounter
from torch_dynemb.plan.coverage import Coverage, rank_load
from torch_dynemb.plan.growth import distinct_ids

pytestmark = pytest.mark.cpu_only("counts ids on the host")


@pytest.fixture(scope="module")
def stream() -> np.ndarray:
    return zipf(60_000, 1.05, 1_000_000, seed=3)


def test_counts_are_those_of_numpy(stream: np.ndarray) -> None:
    counts = counted(stream, 1 << 19)
    ids, first, times = np.unique(stream, return_index=True, return_counts=True)
    assert counts.ids.tolist() == ids.tolist()
    assert counts.counts.tolist() == times.tolist()
    assert counts.first.tolist() == first.tolist()
    assert (counts.lookups, counts.lines, counts.sampled) == (60_000, 60_000, False)


@pytest.mark.parametrize("kept", [64, 1000, 5000])
def test_a_sample_is_bounded_exact_and_stands_for_all(stream: np.ndarray, kept: int) -> None:
    counts = counted(stream, kept)
    assert counts.sampled
    assert counts.ids.numel() <= kept
    ids, first, times = np.unique(stream, return_index=True, return_counts=True)
    places = np.searchsorted(ids, counts.ids.numpy())
    assert counts.counts.tolist() == times[places].tolist()
    assert counts.first.tolist() == first[places].tolist()
    assert counts.distinct == pytest.approx(len(ids), rel=4 / kept**0.5)
    most_frequent = ids[np.argsort(-times)[:3]]
    assert set(most_frequent.tolist()) <= set(counts.ids.tolist())


def test_extreme_ids_are_sampled() -> None:
    counter = IdCounter(64)
    ids = torch.cat([torch.arange(500), torch.tensor([-(1 << 63), (1 << 63) - 1, -1])])
    counter.add(ids, torch.zeros_like(ids), lines=1)
    counts = counter.counts()
    assert counts.ids.numel() <= 64
    assert counts.distinct == pytest.approx(503, rel=0.5)


@pytest.mark.long
def test_nearly_all_intervals_have_the_truth() -> None:
    found = [
        trial
        for make in STREAMS.values()
        for times in (2, 10, 100)
        for trial in trials(make(40_000, 1), times, 1 << 19)
    ]
    assert len(found) == 12 * 3 * 5
    assert sum(trial.inside for trial in found) >= 0.85 * len(found)


@pytest.mark.long
def test_an_interval_says_something() -> None:
    found = [trial for make in STREAMS.values() for trial in trials(make(40_000, 1), 2, 1 << 19)]
    assert np.median([trial.width for trial in found]) < 1.5
    assert np.median([trial.error for trial in found]) < 0.05


@pytest.mark.parametrize("name", STREAMS)
def test_the_estimate_is_in_its_interval_and_grows(name: str) -> None:
    counts = counted(STREAMS[name](20_000, 2), 1 << 19)
    before = distinct_ids(counts, 1)
    assert before == (counts.distinct,) * 3
    for times in (1.5, 3, 40, 1e6):
        now = distinct_ids(counts, times)
        assert now.low <= now.expected <= now.high <= counts.lookups * times
        assert before.expected <= now.expected
        assert before.high <= now.high
        before = now


def test_streams_whose_growth_is_known() -> None:
    new = counted(np.arange(5000), 1 << 19)
    assert distinct_ids(new, 10).high == pytest.approx(50_000)
    assert distinct_ids(new, 10).expected == pytest.approx(50_000)
    closed = counted(np.arange(5000) % 7, 1 << 19)
    assert distinct_ids(closed, 10).expected == 7


@pytest.mark.parametrize("lines", [0, 1, 2, 5])
def test_the_smallest_samples(lines: int) -> None:
    counts = counted(np.zeros(lines, np.int64), 64)
    low, expected, high = distinct_ids(counts, 10)
    assert low <= expected <= high
    assert low == min(lines, 1)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="kept is 63, expected at least 64"):
        IdCounter(63)
    counts = counted(np.arange(9), 64)
    with pytest.raises(ValueError, match=r"times is 0\.5, expected a finite number of at least 1"):
        distinct_ids(counts, 0.5)
    with pytest.raises(ValueError, match="times is inf"):
        distinct_ids(counts, float("inf"))
    counter = IdCounter()
    with pytest.raises(TypeError, match=r"ids has dtype torch\.int32"):
        counter.add(torch.zeros(1, dtype=torch.int32), torch.zeros(1).long(), lines=1)
    assert counter.counts().lookups == 0


def test_coverage_of_known_counts() -> None:
    counts = counted(np.repeat([5, 6, 7, 8], [6, 2, 1, 1]), 64)
    coverage = Coverage([counts])
    assert [coverage.share(ids) for ids in (1, 2, 3, 4, 9)] == [0.6, 0.8, 0.9, 1, 1]
    assert [coverage.capacity(share) for share in (0.5, 0.6, 0.61, 0.95)] == [1, 1, 2, 4]
    assert coverage.divided(2) == [2]
    # two of ten lookups are of ids seen once: what is new gets as much (Good 1953)
    assert coverage.later_share(4, 8) == pytest.approx(0.8)
    assert coverage.later_share(6, 8) == pytest.approx(0.9)
    assert coverage.later_share(8, 8) == 1


@pytest.mark.parametrize("kept", [4096, 1 << 19])
def test_the_most_frequent_ids_serve_later_lookups_as_said(stream: np.ndarray, kept: int) -> None:
    half = len(stream) // 2
    coverage = Coverage([counted(stream[:half], kept)])
    ids, times = np.unique(stream[:half], return_counts=True)
    for capacity in (10, 100, 1000, 10_000):
        frequent = ids[np.argsort(-times, kind="stable")[:capacity]]
        truth = np.isin(stream[half:], frequent).mean()
        assert coverage.later_share(capacity, 1e9) == pytest.approx(truth, abs=0.03)


def test_the_columns_of_a_capacity() -> None:
    columns = [counted(np.repeat([1, 2], [9, 1]), 64), counted(np.repeat([1, 2], [5, 4]), 64)]
    assert Coverage(columns).divided(3) == [1, 2]


def test_the_busiest_rank() -> None:
    columns = [counted(np.full(100, 3), 64), counted(np.full(60, 3), 64)]
    assert rank_load(columns, 4).busiest == 1
    assert rank_load([counted(np.arange(40_000), 1 << 19)], 4).busiest == pytest.approx(
        0.25, rel=0.05
    )
