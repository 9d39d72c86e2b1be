"""Ids drawn from a table: distribution, probabilities, what is never drawn."""

from __future__ import annotations

import math

import pytest
import torch
from execution import threads
from group_calls import raises_in_step
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import BUCKET_WORDS, META_COLUMNS, TABLE_COLUMNS, Meta, Table
from torch_dynemb.table.sampling import REFRESH_STEPS

pytestmark = pytest.mark.any_device

SLOTS = 512


def index_of(load: float) -> tuple[ops.IndexTensors, Tensor]:
    """An index of one table at any load, and its ids. Sampling does not hash them."""
    buckets = torch.zeros(SLOTS // 4, BUCKET_WORDS, dtype=torch.int64)
    live = max(1, round(load * SLOTS))
    ids = torch.arange(live) * 7 - 1000
    slots = torch.arange(live) * SLOTS // live
    buckets[slots // 4, slots % 4] = ids
    buckets[slots // 4, slots % 4 + 4] = torch.arange(live) + 1
    empty = (torch.arange(SLOTS) % 5 == 0) & ~torch.isin(torch.arange(SLOTS), slots)
    gone = empty.nonzero()[:, 0]
    buckets[gone // 4, gone % 4] = 5  # tombstones
    tables = torch.zeros(1, TABLE_COLUMNS, dtype=torch.int64)
    tables[0, [Table.BUCKET_COUNT, Table.SIZE]] = torch.tensor([SLOTS // 4, live])
    meta = torch.zeros(1, META_COLUMNS, dtype=torch.int64)
    meta[0, Meta.REGION_BUCKETS], meta[0, Meta.DIM] = SLOTS // 4, 1
    return ops.IndexTensors.read_only(buckets, tables, meta), ids


def is_plausible(ids: Tensor, live: Tensor, shares: Tensor) -> bool:
    """Whether the chi-square statistic is within 5 standard deviations of its mean."""
    order = live.argsort()
    place = torch.searchsorted(live[order].contiguous(), ids)
    seen = torch.bincount(place, minlength=live.numel()).double()
    expected = shares[order].double() * ids.numel()
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = live.numel() - 1
    return statistic <= freedom + 5 * math.sqrt(2 * freedom) + 10


@pytest.mark.parametrize("load", [0.01, 0.1, 0.4, 0.7, 0.9])
def test_every_id_has_the_same_chance_at_any_load(load: float) -> None:
    index, live = index_of(load)
    shares = torch.full(live.shape, 1 / live.numel())
    for seed in range(20):
        ids = ops.sample_ids(index, torch.tensor([seed]), table=0, samples=4000)
        assert bool(torch.isin(ids, live).all())
        assert is_plausible(ids, live, shares)


def test_samples_differ_by_seed_alone() -> None:
    index, _ = index_of(0.05)
    draws = []
    for count in (1, 2):
        with threads(count):
            draws.append(ops.sample_ids(index, torch.tensor([3]), table=0, samples=5000))
    assert torch.equal(*draws)
    other = ops.sample_ids(index, torch.tensor([4]), table=0, samples=5000)
    assert not torch.equal(draws[0], other)
    few = ops.sample_ids(index, torch.tensor([3]), table=0, samples=100)
    assert torch.equal(few, draws[0][:100])


def group_of(score: object = "frequency", **options: object) -> td.TableGroup:
    policy = td.Policy(score=score, **options)  # type: ignore[arg-type]
    tables = [td.TableConfig("other", 2), td.TableConfig("items", 3, policy=policy)]
    return td.TableGroup(tables, optimizer=td.SGD(lr=0.1), seed=2)


def test_removed_ids_are_never_drawn() -> None:
    group = group_of()
    group.insert(1, torch.arange(1000))
    group.sample_ids(1, 10, by="frequency")  # lists all
    group.erase(1, torch.arange(0, 1000, 2))
    left = torch.arange(1, 1000, 2)
    for by in ("uniform", "frequency"):
        torch.manual_seed(1)
        ids, log_probabilities = group.sample_ids(1, 2000, by=by)
        assert bool(torch.isin(ids, left).all())
        listed = 500 if by == "uniform" else 1000
        torch.testing.assert_close(
            log_probabilities, torch.full((2000,), -math.log(listed)), rtol=1e-5, atol=0
        )
    group.erase(1, left)
    group.insert(1, torch.tensor([-5]))  # all that are listed have gone
    assert group.sample_ids(1, 3, by="frequency").ids.tolist() == [-5] * 3


def test_ids_that_the_same_step_evicts_are_never_drawn() -> None:
    group = group_of(capacity=50)
    for step in range(5):
        group.insert(1, torch.arange(30) + 30 * step)
        live = torch.cat([batch.ids for batch in group.export(1)])
        assert live.numel() == min(50, 30 * (step + 1))
        for by in ("uniform", "frequency"):
            ids = group.sample_ids(1, 300, by=by).ids
            assert bool(torch.isin(ids, live).all())
        group.step()


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_draws_by_frequency_go_by_counts(power: float) -> None:
    group, live = group_of(), torch.arange(10)
    group.insert(1, live.repeat_interleave(live + 1))
    torch.manual_seed(3)
    ids, log_probabilities = group.sample_ids(1, 8000, by="frequency", power=power)
    weights = (live + 1).double() ** power
    shares = weights / weights.sum()
    assert is_plausible(ids, live, shares)
    torch.testing.assert_close(log_probabilities.exp(), shares[ids].float())


def test_decayed_counts_are_counts() -> None:
    group = group_of("decayed", half_life="1m")
    group.index.clock[1] = 1000
    group.insert(1, torch.tensor([1, 1, 1, 1]))
    group.step(now=1120)
    group.insert(1, torch.tensor([2]))
    log_probabilities = group.sample_ids(1, 200, by="frequency").log_probabilities
    expected = torch.tensor([0.5])  # four have become one
    torch.testing.assert_close(log_probabilities.exp().unique(), expected)


def test_steps_list_counted_ids_again() -> None:
    group = group_of()
    group.insert(1, torch.tensor([1]))
    group.sample_ids(1, 1, by="frequency")
    for step in range(REFRESH_STEPS + 1):
        group.insert(1, torch.tensor([100 + step]))
        group.step()
    counted = group.tables.host.counted[1, 1.0]
    assert counted.step == 64  # 1, 2, 4 ...
    assert counted.ids.numel() == 65
    assert bool((counted.sums.diff() == 1).all())


def test_an_empty_table_has_no_id_to_sample() -> None:
    group = group_of()
    with raises_in_step(group, "table ('items'|1) is empty.*train it first"):
        group.sample_ids(1, 3)
    with pytest.raises(RuntimeError, match=r"'items' has no id with a count.*train it first"):
        group.sample_ids(1, 3, by="frequency")
    assert group.sample_ids(1, 0).ids.shape == (0,)
