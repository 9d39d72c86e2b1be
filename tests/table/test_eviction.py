"""Capacity and eviction: which ids go, which stay, and what is counted."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from execution import threads
from group_calls import differences, raises_in_step, snapshot, train, unchanged
from policy_oracle import entries_of, expected_call
from seeding import seeded
from torch import Tensor
from whole_group import check_whole

import torch_dynemb as td
from torch_dynemb.ops.columns import BUCKET_WIDTH, FREE_STEP, Slab, Table
from torch_dynemb.table.evictions import evicted_ids, record_as_evicted

pytestmark = pytest.mark.any_device

POLICIES = {
    "lru": td.Policy(capacity=50),
    "lfu": td.Policy(score="frequency", capacity=50),
    "timestamp": td.Policy(score="timestamp", capacity=50, ttl=5),
    "timestamp and frequency": td.Policy(score=("timestamp", "frequency"), capacity=50),
    "frequency and timestamp": td.Policy(score=("frequency", "timestamp"), capacity=50),
    "custom": td.Policy(score="custom", capacity=50),
    "three steps": td.Policy(capacity=50, protected_steps=3),
    "default": td.Policy(score="step", capacity=50, on_full="default"),
    "grow": td.Policy(score="frequency", capacity=50, on_full="grow"),
}


def make_group(policy: td.Policy, **arguments: Any) -> td.TableGroup:
    table = td.TableConfig("t", 4, policy=policy)
    given = {"optimizer": td.Adagrad(lr=0.1), "seed": 1, **arguments}
    group = td.TableGroup([table], **given)
    if keeps_time(policy):
        group.clock.set_now(0)
    return group


def keeps_time(policy: td.Policy) -> bool:
    return "timestamp" in policy.scores or policy.ttl is not None


def zipf_ids(generator: torch.Generator, count: int, distinct: int) -> Tensor:
    uniform = torch.rand(count, generator=generator)
    return (distinct**uniform).long() * 7919 - 100


@pytest.mark.long_cases("grow-150")
@pytest.mark.parametrize("capacity", [50, 150])  # a small index is looked at as a whole
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_every_call_does_what_a_plain_model_says(policy: td.Policy, capacity: int) -> None:
    group = make_group(td.Policy(**{**vars(policy), "capacity": capacity}))
    group.evicted.record(1000)
    generator = seeded(3)
    compared = 0
    for step in range(60):
        if "custom" in policy.scores:
            group.scores.set_batch(0, int(torch.randint(0, 5, (1,), generator=generator)))
        count = int(torch.randint(1, capacity * 4 // 5, (1,), generator=generator))
        ids = zipf_ids(generator, count, 6 * capacity)
        before = group.usage.tables(wait=True)["t"]
        expected = expected_call(group, 0, ids.tolist())
        handles = group.insert(0, ids)
        after = group.usage.tables(wait=True)["t"]
        records = group.evicted.take()
        evicted = records["t"].ids.tolist() if records else []
        assert len(evicted) == after.evicted - before.evicted
        group.step(now=100 + step // 2 if keeps_time(policy) else None)
        check_whole(group)
        if after.growths != before.growths:
            continue  # victims are looked for where the rehash has put them
        compared += 1
        assert evicted == expected.evicted
        assert after.rejected - before.rejected == expected.rejected
        entries = entries_of(group, 0)
        assert {id: entry.scores for id, entry in entries.items()} == expected.scores
        for id, handle in zip(ids.tolist(), handles.tolist(), strict=True):
            assert expected.handles[id] in (0, handle)
            assert handle == (entries[id].handle if id in entries else -3)
        assert after.found - before.found + after.missed - before.missed == ids.numel()
        refused = int((handles == -3).sum())
        assert after.default_served - before.default_served == refused
    assert compared > 30
    assert (group.usage.tables(wait=True)["t"].evicted > 100) == (policy.on_full is None)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_any_number_of_threads_gives_the_same_state(policy: td.Policy) -> None:
    policy = td.Policy(**{**vars(policy), "capacity": 20_000})
    states = []
    for count in (1, 2):
        with threads(count):
            group = make_group(policy, max_rows=60_000)
            group.evicted.record(30_000)
            if "custom" in policy.scores:
                group.scores.set_batch(0, 1)
            generator = seeded(0)
            for step in range(8):
                group.insert(0, torch.randint(0, 40_000, (15_000,), generator=generator))
                group.step(now=step if keeps_time(policy) else None)
            states.append({**snapshot(group), "evicted": group.index.evicted.clone()})
            check_whole(group)
    assert differences(*states) == []


@pytest.mark.parametrize("capacity", [50, 400])  # a small index is looked at as a whole
@pytest.mark.parametrize("policy", ["lru", "lfu", "three steps"])
def test_steps_of_free_slots_change_no_eviction(policy: str, capacity: int) -> None:
    own, *others = (
        make_group(td.Policy(**{**vars(POLICIES[policy]), "capacity": capacity})) for _ in range(4)
    )
    generator = seeded(4)
    changed = 0
    for step in range(40):
        ids = zipf_ids(generator, capacity // 3, 6 * capacity)
        expected = own.insert(0, ids)
        assert all(torch.equal(group.insert(0, ids), expected) for group in others)
        for group in (own, *others):
            group.erase(0, ids[:: 2 + step % 5])
            group.step()
        for group, marks in zip(others, ([0], [FREE_STEP], [0, FREE_STEP]), strict=True):
            active = group.index.active_buckets(0)
            scores = group.index.scores[active]
            free = (group.index.buckets[active, BUCKET_WIDTH:] == 0).nonzero().unbind(1)
            before = scores[free]
            scores[free] = torch.tensor(marks).repeat(free[0].numel())[: free[0].numel()]
            changed += int((scores[free] != before).sum())
        for group in (own, *others):
            check_whole(group)
    assert own.usage.tables(wait=True)["t"].evicted > capacity
    assert changed > 100


def test_nobody_goes_before_the_last_row_is_used() -> None:
    group = make_group(td.Policy(capacity=10_000))
    ids = torch.randperm(1 << 20, generator=seeded(1))[:10_000] * 10**9
    for batch in ids.split(100):
        group.insert(0, batch)
        group.step()
    assert group.usage.tables(wait=True)["t"].evicted == 0
    assert group.size(0) == 10_000
    group.insert(0, torch.tensor([-1]))
    assert (group.usage.tables(wait=True)["t"].evicted, group.size(0)) == (1, 10_000)


def test_ids_of_recent_steps_stay() -> None:
    for protected in (1, 2, 4):
        group = make_group(td.Policy(score="frequency", capacity=400, protected_steps=protected))
        generator = seeded(protected)
        recent: list[Tensor] = []
        for _ in range(60):
            ids = torch.randint(0, 1 << 40, (40,), generator=generator)
            group.insert(0, ids)
            recent = [*recent, ids][-protected:]
            inserted = torch.cat(recent)
            refused = int((~group.contains(0, inserted)).sum())
            assert refused <= group.usage.tables(wait=True)["t"].rejected
            group.step()
        assert bool(group.contains(0, recent[-1]).all())


def test_a_victims_row_starts_clean() -> None:
    group = make_group(td.Policy(capacity=20))
    old, new = torch.arange(20), torch.arange(100, 120)
    for _ in range(3):
        train(group, 0, old, torch.ones(20, 4))
        group.step()
    train(group, 0, new, torch.ones(20, 4))
    kept = new[group.contains(0, new)]
    assert kept.numel() > 10
    assert int(group.index.slabs[0, Slab.NEXT_ROW]) == 20
    other = make_group(td.Policy(capacity=20))
    train(other, 0, new, torch.ones(20, 4))
    # steps of Adagrad depend on the sums of squares, which must not be the victim's
    assert torch.equal(group.read(0, kept), other.read(0, kept))


# -- on_full and check ---------------------------------------------------------------------------


def test_full_tables_that_raise_change_nothing() -> None:
    group = make_group(td.Policy(score="none", capacity=30, on_full="error"), max_rows=64)
    group.insert(0, torch.arange(20))
    before = group.sizes()

    def call() -> Tensor:
        return group.insert(0, torch.arange(15, 31))

    with raises_in_step(
        group, r"table '\w+' has (20 ids and room for 10 more, .* 11|no room for the) new"
    ):
        call()
    assert unchanged(group, call) == []
    assert group.sizes() == before
    assert bool((group.insert(0, torch.arange(15, 30)) >= 0).all())


def test_refused_ids_get_the_vector_that_was_chosen_and_train_nothing() -> None:
    vector = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for refused, expected in (("zeros", torch.zeros(4)), (vector, vector), (None, None)):
        policy = td.Policy(capacity=5, on_full="default", refused=refused, score="none")
        module = td.DynamicEmbedding(4, name="t", optimizer=td.SGD(lr=1.0), policy=policy)
        module(torch.arange(5)).sum().backward()
        before = module.group.read(0, torch.arange(5))
        ids = torch.tensor([3, 70, 71])
        output = module(ids)
        if expected is None:
            assert torch.equal(output[1:], module.group.read(0, ids[1:]))  # what eval gives
        else:
            assert torch.equal(output[1:], expected.expand(2, 4))
        output[1:].sum().backward()
        assert torch.equal(module.group.read(0, torch.arange(5)), before)
        stats = module.group.usage.tables(wait=True)["t"]
        assert (stats.size, stats.rejected, stats.default_served) == (5, 2, 2)


def test_refused_ids_get_what_another_initializer_draws() -> None:
    refused = td.Normal(1.0, 0.5)
    policy = td.Policy(capacity=5, on_full="default", refused=refused, score="none")
    sgd = td.SGD(lr=1.0)
    torch.manual_seed(3)
    module = td.DynamicEmbedding(4, name="t", optimizer=sgd, policy=policy)
    module(torch.arange(5)).sum().backward()
    ids = torch.tensor([3, 70, -71, 70])
    output = module(ids)
    torch.manual_seed(3)
    other = td.DynamicEmbedding(4, name="t", optimizer=sgd, initializer=refused)
    assert torch.equal(output[1:], other.group.read(0, ids[1:]))
    assert torch.equal(output[1], output[3])


def test_growing_past_the_capacity_is_a_choice() -> None:
    group = make_group(td.Policy(capacity=10, on_full="grow"))
    assert bool((group.insert(0, torch.arange(1000)) >= 0).all())
    assert (group.size(0), group.usage.tables(wait=True)["t"].rejected) == (1000, 0)


def test_checks_are_made_at_the_end_of_a_step() -> None:
    def train_once(check: Any) -> td.TableGroup:
        group = make_group(td.Policy(capacity=10, on_full="default", score="none", check=check))
        group.insert(0, torch.arange(10))
        group.step()
        group.insert(0, torch.arange(8, 13))
        return group

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_once("ignore").step()
    message = r"table 't' had no room for 3 new ids since the last step.* larger capacity"
    group = train_once("warning")
    with pytest.warns(RuntimeWarning, match=message):
        group.step()
    group.step()  # said once
    group = train_once("error")
    with pytest.raises(RuntimeError, match=message):
        group.step()
    group.step()


# -- budget --------------------------------------------------------------------------------------


def test_a_budget_in_bytes_is_shared_and_kept() -> None:
    budget = 2_000_000
    tables = [td.TableConfig("small", 8), td.TableConfig("large", 16), td.TableConfig("late", 8)]
    group = td.TableGroup(tables, optimizer=td.Adam(lr=0.1), memory_budget="2MB", seed=1)
    generator = seeded(5)
    for step in range(60):
        ids = [torch.randint(0, 200, (100,), generator=generator)]
        ids.append(torch.randint(0, 1 << 40, (1000,), generator=generator))
        if step >= 40:
            ids.append(torch.randint(0, 1 << 40, (100,), generator=generator))
        for table, values in enumerate(ids):
            train(group, table, values, torch.ones(values.numel(), tables[table].embedding_dim))
        group.step()
        assert group.usage.memory()["total"] <= budget
    stats = group.usage.tables(wait=True)
    assert stats["small"].size == 200
    assert stats["small"].evicted == 0
    assert stats["large"].evicted > 40_000
    assert stats["late"].size > 100  # what is kept for it, though it comes late
    assert group.usage.memory()["total"] > 0.6 * budget


def test_a_budget_is_shared_by_tables_that_need_it_at_once() -> None:
    policy = td.Policy(score="frequency")
    tables = [td.TableConfig(f"t{t}", 4, policy=policy) for t in range(8)]
    group = td.TableGroup(tables, optimizer=None, memory_budget="100KB", seed=1)
    for step in range(20):
        sizes = torch.tensor([0, *range(50, 3550, 500), 4000])
        group.find_or_insert(torch.arange(4000) + 4000 * step, sizes, list(range(8)))
        group.step()
        held = list(group.sizes().values())
        assert held[0] >= 50  # the first needs 50, the others 500
        assert min(held[1:]) > 100
        assert max(held[1:]) - min(held[1:]) <= 1
    assert group.usage.memory()["total"] <= 100_000


def test_capacity_and_budget_hold_together() -> None:
    tables = [td.TableConfig("a", 4, policy=td.Policy(capacity=50)), td.TableConfig("b", 4)]
    group = td.TableGroup(tables, optimizer=None, memory_budget=100_000, seed=1)
    for step in range(20):
        for table in range(2):
            group.insert(table, torch.arange(step * 200, step * 200 + 200))
        group.step()
    assert group.size(0) == 50
    assert group.size(1) > 500
    assert group.usage.memory()["total"] <= 100_000


# -- evicted ids ---------------------------------------------------------------------------------


def test_evicted_ids_and_their_rows_go_to_who_asks() -> None:
    group = make_group(td.Policy(capacity=20))
    received: list[tuple[str, td.EvictedIds]] = []
    group.evicted.call(lambda name, batch: received.append((name, batch)), rows=True)
    train(group, 0, torch.arange(15), torch.ones(15, 4))
    group.insert(0, torch.arange(15, 20))  # never trained
    rows = group.read(0, torch.arange(20))
    group.step()
    assert received == []
    train(group, 0, torch.arange(100, 110), torch.ones(10, 4))
    there = group.contains(0, torch.arange(20))
    group.step()
    [(name, batch)] = received
    assert name == "t"
    assert set(batch.ids.tolist()) == set(torch.arange(20)[~there].tolist())
    assert batch.scores.tolist() == [0] * len(batch.ids)
    assert batch.rows is not None
    assert torch.equal(batch.rows, rows[batch.ids])
    group.step()
    assert len(received) == 1


def test_a_callback_stays_where_room_for_records_changes() -> None:
    group = make_group(td.Policy(capacity=20))
    received: list[int] = []
    group.evicted.call(lambda _, batch: received.append(batch.ids.numel()), records=3)
    group.evicted.record(30)
    group.insert(0, torch.arange(20))
    group.step()
    group.insert(0, torch.arange(100, 110))
    group.step()
    assert received == [group.usage.tables(wait=True)["t"].evicted] != [0]


def test_records_that_do_not_fit_are_reported() -> None:
    group = make_group(td.Policy(capacity=20))
    group.evicted.record(3)
    group.insert(0, torch.arange(20))
    group.step()
    group.insert(0, torch.arange(100, 110))
    lost = group.usage.tables(wait=True)["t"].evicted - 3
    with pytest.raises(RuntimeError, match=rf"{lost} evicted ids were not recorded: .* room for 3"):
        group.evicted.take()
    assert group.evicted.take() == {}
    with pytest.raises(ValueError, match="records is 0, expected at least 1"):
        group.evicted.record(0)
    with pytest.raises(TypeError, match="callback is 7, expected a function"):
        group.evicted.call(7)  # type: ignore[arg-type]


# -- life ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_saved_state_goes_on_bit_for_bit(policy: td.Policy) -> None:
    def live(group: td.TableGroup, first: int, last: int) -> None:
        for step in range(first, last):
            if "custom" in policy.scores:
                group.scores.set_batch(0, step % 4)
            generator = seeded(step)
            train(group, 0, zipf_ids(generator, 30, 500), torch.ones(30, 4))
            group.step(now=1000 + step if keeps_time(policy) else None)

    whole, first = make_group(policy, max_rows=2000), make_group(policy, max_rows=2000)
    live(whole, 0, 40)
    live(first, 0, 20)
    second = make_group(policy, max_rows=2000)
    second.state.load(first.state.tensors())
    live(second, 20, 40)
    whole.materialize()
    second.materialize()
    assert differences(whole.state.tensors(), second.state.tensors()) == []


@pytest.mark.traced
def test_modules_evict_in_compiled_code() -> None:
    def run(compiled: bool) -> tuple[Tensor, dict[str, Any]]:
        torch._dynamo.reset()
        policy = td.Policy(score="frequency", capacity=60)
        module = td.DynamicEmbeddingBag(
            4, mode="sum", name="t", optimizer=td.Adam(lr=0.1), policy=policy
        )
        forward = torch.compile(module, fullgraph=True) if compiled else module
        for step in range(8):
            forward(zipf_ids(seeded(step), 60, 400).reshape(20, 3)).square().sum().backward()
            module.optimizer.step()
        [batch] = module.group.export(0)
        return batch.rows, module.group.usage.tables(wait=True)["t"].as_dict()

    rows, stats = run(compiled=False)
    compiled_rows, compiled_stats = run(compiled=True)
    assert stats["evicted"] > 50
    assert compiled_stats == stats
    torch.testing.assert_close(compiled_rows, rows)


def test_counts_of_the_row_table() -> None:
    group = make_group(td.Policy(capacity=20))
    group.insert(0, torch.arange(25))
    row = group.index.tables[0]
    assert int(row[Table.SIZE]) == 20
    assert int(row[Table.REJECTED]) == 5  # all are protected in their own step


def test_ids_that_are_erased_for_room_count_as_evicted() -> None:
    policy = td.Policy(score="frequency", capacity=8)
    group = td.TableGroup([td.TableConfig("ads", 4, policy=policy)], optimizer=td.SGD(lr=0.1))
    group.insert(0, torch.tensor([1, 2, 3, 4]))
    group.evicted.record(3, rows=True)
    rows = group.read(0, torch.tensor([2, 3]))
    evicted = evicted_ids(group.tables, 0, torch.tensor([2, 9, 3]))
    group.erase(0, torch.tensor([2, 3]))
    record_as_evicted(group.tables, 0, evicted)
    counts = group.index.tables[0]
    assert (int(counts[Table.ERASED]), int(counts[Table.EVICTED])) == (0, 2)
    taken = group.evicted.take()["ads"]
    assert taken.ids.tolist() == [2, 3]
    assert taken.rows is not None
    assert torch.equal(taken.rows, rows)
    record_as_evicted(group.tables, 0, evicted)
    record_as_evicted(group.tables, 0, evicted)  # beyond the room of the records
    with pytest.raises(RuntimeError, match="1 evicted ids were not recorded"):
        group.evicted.take()
