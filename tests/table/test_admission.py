"""Which new ids get a row, what the others get, and what is kept about them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from execution import threads
from group_calls import bag_lookup, call_of, differences, raises_in_step, train
from seeding import seeded
from table_ids import ids_of
from torch import Tensor
from whole_group import check_whole

import torch_dynemb as td
from torch_dynemb.policy import admission
from torch_dynemb.table.content import read_counts

pytestmark = pytest.mark.any_device


def make_group(
    rule: admission.AdmissionRule | None, *, tables: int = 1, **policy: Any
) -> td.TableGroup:
    given = td.Policy(admission=rule, **policy)
    configs = [td.TableConfig(f"t{t}", 4, policy=given) for t in range(tables)]
    return td.TableGroup(configs, optimizer=td.Adagrad(lr=0.1), max_rows=60_000, seed=1)


def zipf_ids(generator: torch.Generator, count: int, distinct: int) -> Tensor:
    return (distinct ** torch.rand(count, generator=generator)).long() * 7919 - 100


# -- frequency -----------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2])
def test_exact_counts_admit_with_the_occurrence_of_the_threshold(
    threshold: int, count: int
) -> None:
    group = make_group(td.AdmitFrequent(threshold))
    generator = seeded(threshold)
    seen: Counter[int] = Counter()
    refused = calls = 0
    with threads(count):
        for _ in range(12):
            ids = zipf_ids(generator, 3000, 4000)
            handles = group.insert(0, ids)
            seen.update(ids.tolist())
            expected = torch.tensor([seen[id] >= threshold for id in ids.tolist()])
            assert torch.equal(handles >= 0, expected)
            assert bool((handles[~expected] == -3).all())
            refused += int((~expected).sum())
            calls += ids[~expected].unique().numel()
            group.step()
    assert ids_of(group) == {id for id, n in seen.items() if n >= threshold}
    stats = group.usage.tables(wait=True)["t0"]
    assert stats.counted == sum(n < threshold for n in seen.values())
    assert (stats.not_admitted, stats.default_served) == (calls, refused)
    assert stats.found + stats.missed == 12 * 3000


@pytest.mark.parametrize("rule", [td.AdmitFrequent(5), td.AdmitFrequentSketch(5, "64KB")])
def test_what_was_counted_is_the_frequency_of_an_admitted_id(
    rule: admission.AdmissionRule,
) -> None:
    group = make_group(rule, score="frequency")
    for ids in ([7, 7], [7, 8], [7, 7, 7]):
        group.insert(0, torch.tensor(ids))
    assert group.scores.get(0, torch.tensor([7, 8])).scores.tolist() == [6, 0]
    group.insert(0, torch.tensor([7]))
    assert group.scores.get(0, torch.tensor([7])).scores.tolist() == [7]


def test_exact_counts_are_kept_by_table() -> None:
    group = make_group(td.AdmitFrequent(2), tables=2)
    ids = torch.arange(10)
    call = call_of(group, [(0, [[1, 2]]), (1, [[2, 3]])])
    group.find_or_insert(call.ids, call.offsets, call.tables)
    group.insert(0, ids)
    assert ids_of(group, 0) == {1, 2}
    assert ids_of(group, 1) == set()
    group.insert(1, torch.tensor([3]))
    assert ids_of(group, 1) == {3}


def test_a_sketch_never_admits_too_late_and_seldom_too_early() -> None:
    group = make_group(td.AdmitFrequentSketch(3, memory="400KB"))
    generator = seeded(7)
    seen: Counter[int] = Counter()
    for _ in range(20):
        ids = zipf_ids(generator, 2000, 20_000)
        handles = group.insert(0, ids)
        seen.update(ids.tolist())
        frequent = torch.tensor([seen[id] >= 3 for id in ids.tolist()])
        assert bool((handles[frequent] >= 0).all())
        group.step()
    rare = [id for id, n in seen.items() if n < 3]
    early = ids_of(group) & set(rare)
    assert len(rare) > 3000
    # the bound: a count is off by more than e / 25,000 * 40,000 = 4 with probability e^-4
    assert len(early) < 0.018 * len(rare)
    assert group.usage.tables(wait=True)["t0"].counter_bytes == 400_000


def test_a_small_sketch_overestimates_and_its_memory_matters() -> None:
    early = []
    for memory in (512, 4096, 65_536):
        group = make_group(td.AdmitFrequentSketch(3, memory=memory))
        for ids in torch.arange(5000).split(50):  # counts of a call are taken before it
            group.insert(0, ids)
        early.append(group.size(0))
    assert early[0] > 4500
    assert early[0] > early[1] > early[2]
    assert early[2] < 50


def test_counts_of_a_sketch_are_halved_as_asked() -> None:
    for halve_every, admitted in ((None, True), (1, False), (3, True)):
        group = make_group(td.AdmitFrequentSketch(3, "64KB", halve_every=halve_every))
        for _ in range(2):
            group.insert(0, torch.tensor([5]))
            group.step()
        group.insert(0, torch.tensor([5]))
        assert (group.size(0) == 1) is admitted


def test_counts_survive_saving_and_can_be_reset() -> None:
    for rule in (td.AdmitFrequent(3), td.AdmitFrequentSketch(3, "64KB", halve_every=50)):
        group = make_group(rule)
        generator = seeded(1)
        for _ in range(5):
            train(group, 0, zipf_ids(generator, 200, 500), torch.ones(200, 4))
            group.step()
        state = group.state.tensors()
        copy = make_group(rule)
        copy.state.load(state)
        for continued in (group, copy):
            continued_ids = seeded(2)
            for _ in range(60):
                train(continued, 0, zipf_ids(continued_ids, 200, 500), torch.ones(200, 4))
                continued.step()
        assert differences(group.state.tensors(), copy.state.tensors()) == []
        group.clear(0)
        group.insert(0, torch.tensor([10**6, 10**6]))
        group.reset_counts(0)
        group.insert(0, torch.tensor([10**6]))
        assert group.size(0) == 0
        group.insert(0, torch.tensor([10**6, 10**6]))
        assert group.size(0) == 1
    with pytest.raises(ValueError, match="reset_counts: table 't0' counts nothing"):
        make_group(None).reset_counts(0)


# -- no room -------------------------------------------------------------------------------------

COUNTING = [td.AdmitFrequent(3), td.AdmitFrequentSketch(3, "64KB")]


def full_group(rule: admission.AdmissionRule, **policy: Any) -> td.TableGroup:
    """A table that ids 1 and 2 fill; both have been seen in this step."""
    group = make_group(rule, score="frequency", capacity=2, **policy)
    group.insert(0, torch.tensor([1, 2]).repeat(3))
    assert ids_of(group) == {1, 2}
    return group


@pytest.mark.parametrize("rule", COUNTING)
@pytest.mark.parametrize("on_full", ["default", "evict"])
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_an_id_that_finds_no_room_keeps_its_count(
    rule: admission.AdmissionRule, on_full: Any, at_once: bool
) -> None:
    group = full_group(rule, on_full=on_full)
    for ids in [[7] * 4] if at_once else [[7]] * 4:
        assert group.insert(0, torch.tensor(ids)).tolist() == [-3] * len(ids)
    assert group.usage.tables(wait=True)["t0"].rejected == (1 if at_once else 2)
    group.insert(0, torch.tensor([8]))
    group.erase(0, torch.tensor([1]))
    group.insert(0, torch.tensor([8]))  # has not been seen often enough
    assert ids_of(group) == {2}
    group.insert(0, torch.tensor([7]))
    assert ids_of(group) == {2, 7}
    assert group.scores.get(0, torch.tensor([7])).scores.tolist() == [5]  # all are counted
    if isinstance(rule, td.AdmitFrequent):
        assert group.usage.tables(wait=True)["t0"].counted == 1  # 8 is, 7 is no longer


@pytest.mark.parametrize("rule", COUNTING)
def test_an_id_keeps_its_count_until_it_finds_a_victim(rule: admission.AdmissionRule) -> None:
    group = full_group(rule, protected_steps=2)
    for _ in range(2):
        group.insert(0, torch.tensor([7, 7, 7]))
        group.step()
    assert ids_of(group) == {1, 2}
    group.insert(0, torch.tensor([7]))
    assert 7 in ids_of(group)
    assert group.scores.get(0, torch.tensor([7])).scores.tolist() == [7]
    assert group.usage.tables(wait=True)["t0"].counted == 0


@pytest.mark.parametrize("rule", COUNTING)
def test_counts_stay_where_a_budget_leaves_no_room(rule: admission.AdmissionRule) -> None:
    policy = td.Policy(admission=rule, on_full="default")
    group = td.TableGroup(
        [td.TableConfig("t0", 4, policy=policy)], optimizer=None, memory_budget="120KB", seed=1
    )
    ids = torch.arange(5000)
    handles = group.insert(0, ids.repeat(3))[:5000]
    refused = ids[handles < 0]
    assert 0 < refused.numel() < 5000
    assert bool((group.insert(0, refused) == -3).all())
    group.erase(0, ids[handles >= 0])
    assert bool((group.insert(0, refused[:50]) >= 0).all())


@pytest.mark.parametrize("rule", COUNTING)
def test_checks_that_raise_leave_the_counts(rule: admission.AdmissionRule) -> None:
    group = full_group(rule, on_full="default", check="error")
    group.insert(0, torch.tensor([7, 7, 7]))
    with pytest.raises(RuntimeError, match="table 't0' had no room for 1 new ids"):
        group.step()
    group.erase(0, torch.tensor([1]))
    group.insert(0, torch.tensor([7]))
    assert ids_of(group) == {2, 7}


@pytest.mark.parametrize("rule", COUNTING)
def test_a_full_table_that_raises_counts_nothing(rule: admission.AdmissionRule) -> None:
    group = make_group(rule, capacity=2, on_full="error")
    group.insert(0, torch.tensor([1, 2]).repeat(3))
    group.insert(0, torch.tensor([7, 7]))
    sketch = group.index.sketch.clone()
    for _ in range(3):
        with raises_in_step(group, "table 't0' has (2 ids and room for 0|no room for the)"):
            group.insert(0, torch.tensor([7, 8]))
    counted = group.usage.tables(wait=True)["t0"].counted
    assert counted == (1 if isinstance(rule, td.AdmitFrequent) else 0)
    assert torch.equal(group.index.sketch, sketch)
    group.erase(0, torch.tensor([1]))
    group.insert(0, torch.tensor([7]))
    assert ids_of(group) == {2, 7}


# -- rows without admission ----------------------------------------------------------------------


def test_ids_that_are_assigned_a_row_wait_no_longer() -> None:
    group = make_group(td.AdmitFrequent(3), tables=2)
    for table in (0, 1):
        group.insert(table, torch.tensor([7, 7, 8, 9]))
    rows = torch.arange(8.0).reshape(2, 4)
    group.insert_or_assign(0, torch.tensor([7, 10]), rows)
    stats = group.usage.tables(wait=True)
    assert (stats["t0"].counted, stats["t0"].size, stats["t1"].counted) == (2, 2, 3)
    check_whole(group)  # no row has been given back for a count
    group.insert_or_assign(0, torch.tensor([7, 10]), rows)  # again
    assert group.erase(0, torch.tensor([7])) == 1
    group.insert(0, torch.tensor([7, 7]))
    assert ids_of(group) == {10}
    group.insert(0, torch.tensor([8, 8]))
    assert ids_of(group) == {8, 10}
    group.insert(1, torch.tensor([7]))
    assert ids_of(group, 1) == {7}
    check_whole(group)


def test_rows_that_are_not_assigned_leave_the_counts() -> None:
    group = make_group(td.AdmitFrequent(3), score="step", capacity=2, on_full="default")
    group.insert(0, torch.tensor([7, 7, 8]))
    before = counts_of(group)
    with pytest.raises(RuntimeError, match="has no room for all ids; none has been inserted"):
        group.insert_or_assign(0, torch.tensor([8, 7, 9]), torch.zeros(3, 4))
    assert ids_of(group) == set()
    assert counts_of(group) == before == {7: 2, 8: 1}


def counts_of(group: td.TableGroup) -> dict[int, int]:
    counted = read_counts(group.tables, 0)
    assert counted is not None
    return dict(zip(counted.ids.tolist(), counted.counts.tolist(), strict=True))


# -- chance, none, hooks -------------------------------------------------------------------------


def test_chance_admits_its_share_and_draws_by_id_and_step() -> None:
    group, again = (make_group(td.AdmitByChance(0.3)) for _ in range(2))
    ids = torch.arange(20_000)
    group.insert(0, ids)
    assert abs(group.size(0) / 20_000 - 0.3) < 0.01
    first = ids_of(group)
    group.insert(0, ids)  # in the same step the same draw
    assert ids_of(group) == first
    group.step()
    group.insert(0, ids)
    assert abs(group.size(0) / 20_000 - (1 - 0.7**2)) < 0.01
    again.insert(0, ids.flip(0))
    assert ids_of(again) == first
    everyone = make_group(td.AdmitByChance(1.0))
    everyone.insert(0, ids)
    assert everyone.size(0) == 20_000


def test_none_admits_nobody_and_trains_who_is_there() -> None:
    group = make_group(td.AdmitNone())
    group.insert_or_assign(0, torch.arange(3), torch.zeros(3, 4))
    train(group, 0, torch.arange(10), torch.ones(10, 4))
    assert ids_of(group) == {0, 1, 2}
    assert bool((group.read(0, torch.arange(3)) < 0).all())


@td.register_admission("multiples of three")
def multiples_of_three(new: td.NewIds) -> Tensor:
    return (new.ids % 3 == 0) & (new.step >= 1) & (new.table != "t1")


def test_a_registered_function_decides() -> None:
    group = make_group(td.AdmitBy("multiples of three"), tables=2)
    group.insert(0, torch.arange(10))
    assert ids_of(group) == set()
    group.step()
    handles = group.insert(0, torch.arange(10))
    assert (handles >= 0).tolist() == [i % 3 == 0 for i in range(10)]
    group.insert(1, torch.arange(10))
    assert ids_of(group, 1) == set()
    call = call_of(group, [(0, [[12, 13], [15]]), (1, [[12], [15]]), (0, [[18], [19]])])
    bag_lookup(group, call).sum().backward()
    assert ids_of(group) == {0, 3, 6, 9, 12, 15, 18}
    assert ids_of(group, 1) == set()


@pytest.mark.long
@pytest.mark.traced
def test_hooks_run_in_compiled_code() -> None:
    policy = td.Policy(admission=td.AdmitBy("multiples of three"))
    module = td.DynamicEmbedding(4, name="t", optimizer=td.SGD(lr=1.0), policy=policy)
    module.optimizer.step()
    torch._dynamo.reset()
    torch.compile(module, fullgraph=True)(torch.arange(10)).sum().backward()
    assert set(module.ids().tolist()) == {0, 3, 6, 9}


def test_wrong_hooks() -> None:
    with pytest.raises(ValueError, match=r"no admission hook is named 'nothing', only .*register"):
        td.AdmitBy("nothing")
    with pytest.raises(ValueError, match="'multiples of three' is already multiples_of_three"):
        td.register_admission("multiples of three")(lambda new: new.known)
    for wrong, message in (
        (lambda new: new.ids, r"returned torch\.int64 \(3,\), expected a bool tensor"),
        (lambda new: new.known[:1], r"returned torch\.bool \(1,\), expected .* shape \(3,\)"),
        (lambda new: None, "returned None, expected"),
    ):
        admission._hooks["wrong"] = wrong
        group = make_group(td.AdmitBy("wrong"))
        with pytest.raises(TypeError, match=f"admission hook 'wrong' {message}"):
            group.insert(0, torch.arange(3))
        assert group.size(0) == 0
        del admission._hooks["wrong"]


# -- what refused ids get ------------------------------------------------------------------------


def test_ids_that_are_not_admitted_get_the_chosen_vector_in_bags() -> None:
    policy = td.Policy(admission=td.AdmitFrequent(2), refused=torch.full((4,), 3.0))
    module = td.DynamicEmbeddingBag(
        4,
        mode="mean",
        name="t",
        optimizer=td.SGD(lr=1.0),
        policy=policy,
        initializer=td.Constant(1.0),
    )
    known = torch.tensor([[1, 1]])
    assert torch.equal(module(known), torch.ones(1, 4))
    output = module(torch.tensor([[1, 2]]))
    assert torch.equal(output, torch.full((1, 4), 2.0))  # (1 + 3) / 2
    output.sum().backward()
    module.eval()
    assert torch.equal(module(torch.tensor([[1]])), torch.full((1, 4), 0.5))
    assert torch.equal(module(torch.tensor([[2]])), torch.ones(1, 4))  # eval_default
