"""Scores of ids, removal by rule, statistics."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from group_calls import train, unchanged
from table_ids import ids_of
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import Clock, Slab
from torch_dynemb.table import extension

pytestmark = pytest.mark.any_device


def make_group(score: str = "step", **arguments: object) -> td.TableGroup:
    policy = td.Policy(score=score)  # type: ignore[arg-type]
    tables = [td.TableConfig("a", 4, policy=policy), td.TableConfig("b", 4, policy=policy)]
    given = {"optimizer": td.Adagrad(lr=0.1), "seed": 1, **arguments}
    return td.TableGroup(tables, **given)  # type: ignore[arg-type]


def step(group: td.TableGroup, ids: Tensor, table: int = 0) -> None:
    train(group, table, ids, torch.ones(ids.numel(), 4))
    group.step()


# -- scores --------------------------------------------------------------------------------------


def test_scores_are_read_and_set_per_id_and_table() -> None:
    group = make_group()
    for k in range(3):
        step(group, torch.arange(k, 6))
        step(group, torch.arange(3), table=1)
    scores, found = group.scores.get(0, torch.tensor([0, 1, 5, 99]))
    assert scores.tolist() == [0, 2, 4, 0]
    assert found.tolist() == [True, True, True, False]
    values = torch.tensor([7, 1 << 62, 5])
    assert group.scores.set(0, torch.tensor([1, 5, 99]), values) == 2
    assert group.scores.get(0, torch.tensor([0, 1, 5])).scores.tolist() == [0, 7, 1 << 62]
    assert group.scores.get(1, torch.tensor([1])).scores.tolist() == [5]
    step(group, torch.tensor([1]))
    assert group.scores.get(0, torch.tensor([1])).scores.tolist() == [6]


def test_scores_of_many_ids_on_all_threads() -> None:
    group = make_group()
    ids = torch.arange(30_000) * 7919
    group.insert(0, ids)
    assert group.scores.set(0, ids.flip(0), torch.arange(30_000)) == 30_000
    scores, found = group.scores.get(0, ids)
    assert torch.equal(scores, torch.arange(30_000).flip(0))
    assert bool(found.all())


def test_wrong_scores_are_refused() -> None:
    group = make_group()
    group.insert(0, torch.arange(3))
    cases = [
        (torch.arange(3), torch.arange(2), ValueError, r"scores has 2 elements"),
        (torch.arange(3), torch.rand(3), TypeError, r"scores has dtype torch\.float32"),
        (torch.arange(3), torch.tensor([1, -1, 2]), ValueError, "scores has -1, expected steps"),
    ]
    for ids, values, error, message in cases:
        with pytest.raises(error, match=message):
            group.scores.set(0, ids, values)
    assert group.scores.get(0, torch.arange(3)).scores.tolist() == [0, 0, 0]
    without = make_group("none")
    none, other = "keeps no score", "does not keep score 'frequency'"
    for call, lacks in (
        (lambda: without.scores.get(0, torch.arange(3)), none),
        (lambda: without.scores.set(0, torch.arange(3), torch.arange(3)), none),
        (lambda: group.scores.get(0, torch.arange(3), score="frequency"), other),
    ):
        with pytest.raises(ValueError, match=rf"{lacks}: create .* policy=Policy"):
            call()


def test_of_several_scores_for_an_id_the_largest_counts() -> None:
    group = make_group()
    ids = torch.arange(20_000)
    group.insert(0, ids)
    values = torch.stack([ids + 3, ids + 7, ids])
    assert group.scores.set(0, ids.repeat(3), values.flatten()) == 60_000
    assert torch.equal(group.scores.get(0, ids).scores, ids + 7)


# -- time, custom scores -------------------------------------------------------------------------


def timed_module(**policy: Any) -> td.DynamicEmbedding:
    given = td.Policy(**{"score": "timestamp", **policy})
    return td.DynamicEmbedding(4, name="t", optimizer=td.SGD(lr=1.0), policy=given)


def test_a_ttl_may_be_a_text() -> None:
    assert (td.Policy(ttl="7d").ttl, td.FeaturePolicy(ttl="12h").ttl) == (604_800, 43_200)


def test_lookups_stamp_the_time_that_the_last_step_was_told() -> None:
    with mock.patch("time.time", return_value=500.9):
        module = timed_module()
    module(torch.tensor([1])).sum().backward()
    assert int(module.group.scores.get(0, torch.tensor([1])).scores) == 500
    module.optimizer.step(now=1000)
    module(torch.tensor([1, 2])).sum().backward()
    module.group.clock.set_now(2000)
    module(torch.tensor([2])).sum().backward()
    assert module.group.scores.get(0, torch.tensor([1, 2])).scores.tolist() == [1000, 2000]
    module.optimizer.step()
    module(torch.tensor([3])).sum().backward()
    assert int(module.group.scores.get(0, torch.tensor([3])).scores) == 2000  # where it was put
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for one in (*copies, module):
        one.optimizer.step(now=2001)
        one.optimizer.step()
        assert int(one.group.index.clock[Clock.NOW]) == 2001
    module.set_optimizer(td.Adagrad(lr=0.1))
    module.optimizer.step()
    assert int(module.group.index.clock[Clock.NOW]) == 2001
    module.group.clock.set_now(None)
    later = 2_000_000_000_000  # the machine's clock counts again, and may not go back
    with mock.patch("time.time", return_value=float(later)):
        module.optimizer.step()
    assert int(module.group.index.clock[Clock.NOW]) == later


def test_a_shared_time_is_the_latest_that_ranks_propose() -> None:
    """Reading the clock only proposes; what is proposed never goes back, nor does the time."""
    group = timed_module().group
    group.clock.share(100)

    def times() -> tuple[int, int]:
        assert group.clock.proposed is not None
        return int(group.index.clock[Clock.NOW]), int(group.clock.proposed)

    assert times() == (100, 100)
    group.clock.agree_on(torch.tensor([90, 130]))
    assert times() == (130, 100)
    group.clock.agree_on(torch.tensor([120, 110]))
    assert times() == (130, 100)
    with mock.patch("time.time", side_effect=[500.9, 400.0, 600.0]):
        for proposed in (500, 500, 600):
            group.step()
            assert times() == (130, proposed)
    # a time that all ranks give holds at once, also an earlier one
    group.step(now=70)
    assert times() == (70, 70)
    for _ in range(2):
        group.clock.set_now(80)
        assert times() == (80, 80)
        group.step()  # proposes nothing later


def test_a_time_stays_shared() -> None:
    module = timed_module()
    module.group.clock.share(100)
    module.group.clock.agree_on(torch.tensor([130]))
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    module.set_optimizer(td.Adagrad(lr=0.1))
    for one in (module, *copies):
        assert one.group.clock.proposed is not None
        assert one.group.clock.proposed.tolist() == [100]
        assert int(one.group.index.clock[Clock.NOW]) == 130
        one.group.step()
        assert int(one.group.index.clock[Clock.NOW]) == 130


def test_expired_ids_are_read_as_if_they_were_not_there() -> None:
    module = timed_module(score="none", ttl=100)
    module.group.clock.set_now(0)
    initial = module.group.read(0, torch.tensor([1, 2]))
    module(torch.tensor([1, 2])).sum().backward()
    module.optimizer.step(now=60)
    module(torch.tensor([2])).sum().backward()
    trained = module.group.read(0, torch.tensor([1, 2]))
    module.eval()
    assert torch.equal(module(torch.tensor([1, 2])), trained)
    module.group.clock.set_now(100)
    assert torch.equal(module(torch.tensor([1, 2])), torch.stack([initial[0], trained[1]]))
    frozen = td.freeze(module)
    assert torch.equal(frozen(torch.tensor([1, 2])), torch.stack([initial[0], trained[1]]))
    assert len(module) == 2
    module.train()
    module(torch.tensor([1])).sum().backward()  # training brings it back
    module.eval()
    assert torch.equal(module(torch.tensor([1, 2])), module.group.read(0, torch.tensor([1, 2])))
    module.group.clock.set_now(170)
    assert module.group.remove(0, expired=True) == 1
    assert set(module.ids().tolist()) == {1}


def test_wrong_times_are_refused() -> None:
    module, plain = timed_module(), make_group("step")
    for call, error, message in (
        (lambda: module.optimizer.step(now=1.5), TypeError, r"seconds is 1\.5, expected int"),
        (lambda: module.group.clock.set_now(-1), ValueError, "seconds is -1, expected at least 0"),
        (lambda: plain.step(now=-1), ValueError, "seconds is -1, expected at least 0"),
        (lambda: plain.clock.set_now(-1), ValueError, "seconds is -1, expected at least 0"),
        (lambda: plain.remove(0, expired=True), ValueError, "expired needs a ttl"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert int(module.group.index.clock[0]) == int(plain.index.clock[0]) == 0


def test_the_time_is_read_and_tables_without_times_ignore_it() -> None:
    module, plain = timed_module(), make_group("step")
    for group in (module.group, plain):
        group.clock.set_now(170)
        group.step(now=180)
    assert (module.group.clock.now, plain.clock.now) == (180, None)
    assert (module.group.steps, plain.steps) == (1, 1)
    module.group.clock.set_now(None)
    with mock.patch("time.time", return_value=500.9):
        module.group.step()
    assert module.group.clock.now == 500


def test_custom_scores_are_given_by_batch_or_by_id() -> None:
    policy = td.Policy(score="custom", capacity=4)
    module = td.DynamicEmbedding(4, name="t", optimizer=td.SGD(lr=1.0), policy=policy)
    group = module.group
    with pytest.raises(ValueError, match=r"keeps custom scores, but none have been given"):
        module(torch.tensor([1]))
    assert group.size(0) == 0
    module(torch.tensor([1, 2, 1]), scores=torch.tensor([5, 7, 9]))
    assert group.scores.get(0, torch.tensor([1, 2])).scores.tolist() == [9, 7]
    group.scores.set_batch(0, -3)
    module(torch.tensor([2, 3, 4]))
    assert group.scores.get(0, torch.tensor([1, 2, 3, 4])).scores.tolist() == [9, -3, -3, -3]
    bag = td.DynamicEmbeddingBag(4, mode="sum", name="b", optimizer=td.SGD(lr=1.0), policy=policy)
    bag(torch.tensor([[1, 2]]), scores=torch.tensor([[5, 6]]))
    assert bag.group.scores.get(0, torch.tensor([1, 2])).scores.tolist() == [5, 6]
    ids = torch.tensor([1, 2])
    for call, error, message in (
        (lambda: module(ids, scores=ids[:1]), ValueError, r"scores has shape \(1,\)"),
        (lambda: module(ids, scores=ids.float()), TypeError, r"scores has dtype torch\.float32"),
        (lambda: module(ids, scores=[1, 2]), TypeError, "scores is a list, expected a Tensor"),
        (lambda: timed_module()(ids, scores=ids), ValueError, "no table keeps custom scores"),
        (lambda: group.scores.set_batch(0, 1 << 63), ValueError, "expected an int64"),
        (lambda: make_group().scores.set_batch(0, 1), ValueError, "keeps no custom scores"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_copies_know_the_score_of_the_batch() -> None:
    policy = td.Policy(score="custom")
    module = td.DynamicEmbedding(4, name="t", optimizer=td.SGD(lr=1.0), policy=policy)
    module.group.scores.set_batch(0, 7)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        twin(torch.tensor([1]))
        assert twin.group.scores.get(0, torch.tensor([1])).scores.tolist() == [7]


def test_a_group_that_takes_over_keeps_what_is_no_tensor() -> None:
    group, successor = (
        td.TableGroup(
            [td.TableConfig("t", 4, policy=td.Policy(capacity=4))], optimizer=None, seed=1
        )
        for _ in range(2)
    )
    received: list[str] = []
    group.evicted.call(lambda name, _: received.append(name), records=8)
    successor._become(extension.take_over(successor.tables, group.tables))
    for first in (0, 10):
        successor.insert(0, torch.arange(first, first + 4))
        successor.step()
    assert received == ["t"]


def test_tables_that_a_budget_makes_evict_keep_steps() -> None:
    group = td.TableGroup([td.TableConfig("t", 4)], optimizer=None, memory_budget="20KB", seed=1)
    for ids in torch.arange(1000).split(100):
        group.insert(0, ids)
        group.step()
    scores, found = group.scores.get(0, torch.arange(900, 1000))
    assert bool((scores[found] == 9).all())
    assert int(found.sum()) > 50
    [batch] = group.export(0)
    assert set(batch.scores.tolist()) <= set(range(10))
    assert group.remove(0, score_below=9) == len(batch.ids) - int(found.sum())


def test_frequencies_saturate() -> None:
    policy = td.Policy(score="frequency")
    group = td.TableGroup([td.TableConfig("t", 4, policy=policy)], optimizer=None, seed=1)
    group.insert(0, torch.tensor([1, 2, 1]))
    assert group.scores.get(0, torch.tensor([1, 2])).scores.tolist() == [2, 1]
    group.scores.set(0, torch.tensor([1]), torch.tensor([(1 << 62) - 2]))
    for _ in range(3):
        group.insert(0, torch.ones(5000, dtype=torch.int64))
        assert int(group.scores.get(0, torch.tensor([1])).scores) == 1 << 62


# -- removal -------------------------------------------------------------------------------------


def test_ids_not_seen_for_some_steps_go_and_their_rows_start_clean() -> None:
    group = make_group()
    for k in range(5):
        step(group, torch.arange(10 * k, 10 * k + 20))
    fresh = make_group().read(0, torch.arange(1000, 1030))
    assert group.remove(0, not_seen_for=3) == 20
    assert ids_of(group) == set(range(20, 60))
    assert group.remove(0, not_seen_for=3) == 0
    rows = int(group.index.slabs[0, Slab.NEXT_ROW])
    group.insert(0, torch.arange(1000, 1020))
    assert int(group.index.slabs[0, Slab.NEXT_ROW]) == rows  # reused
    assert torch.equal(group.read(0, torch.arange(1000, 1020)), fresh[:20])
    train(group, 0, torch.arange(1000, 1020), torch.ones(20, 4))
    other = make_group()
    train(other, 0, torch.arange(1000, 1020), torch.ones(20, 4))
    ids = torch.arange(1000, 1020)
    assert torch.equal(group.read(0, ids), other.read(0, ids))  # with clean optimizer state


def test_removal_by_score_norm_and_predicate() -> None:
    group = make_group()
    ids = torch.arange(200)
    group.insert_or_assign(0, ids, torch.arange(200)[:, None].expand(200, 4) / 2.0)
    group.scores.set(0, ids, 1000 - ids)
    assert group.remove(0, score_below=901, batch_size=16) == 100
    assert ids_of(group) == set(range(100))
    assert group.remove(0, norm_below=50.0, batch_size=16) == 50
    assert ids_of(group) == set(range(50, 100))
    removed = group.remove(0, predicate=lambda ids, scores: (ids % 2 == 0) & (scores < 930))
    assert removed == 14
    assert ids_of(group) == set(range(50, 71)) | {*range(71, 100, 2)}
    assert group.sizes() == {"a": 36, "b": 0}


def test_clear_leaves_other_tables_alone() -> None:
    group = make_group()
    group.insert(0, torch.arange(1000))
    group.insert(1, torch.arange(10))
    assert group.clear(0) == 1000
    assert group.sizes() == {"a": 0, "b": 10}
    assert group.clear(0) == 0
    group.insert(0, torch.arange(50))
    assert ids_of(group) == set(range(50))


def test_removal_before_a_backward_makes_its_handles_stale() -> None:
    from group_calls import bag_lookup, flat_call

    group = make_group()
    output = bag_lookup(group, flat_call(group, 0, torch.arange(5)))
    group.clear(0)
    group.insert(0, torch.arange(100, 105))
    train(group, 1, torch.arange(1), torch.zeros(1, 4))
    group.rows.row_clock[2] = (
        0  # as if nothing had been updated: only the rows' owners have changed
    )
    assert group.usage.stale_gradients() == 0
    before = group.read(0, torch.arange(100, 105))
    train(group, 0, torch.arange(100, 105), torch.zeros(5, 4))
    group.rows.row_clock[2] = 0
    output.sum().backward()
    assert group.usage.stale_gradients() == 5
    assert torch.equal(group.read(0, torch.arange(100, 105)), before)


@pytest.mark.parametrize(
    ("conditions", "error", "message"),
    [
        ({}, ValueError, r"got no condition, expected one of \['not_seen_for'"),
        ({"score_below": 1, "norm_below": 1.0}, ValueError, r"got \['score_below', 'norm_below'\]"),
        ({"not_seen_for": 0}, ValueError, "not_seen_for is 0, expected at least 1 step"),
        ({"norm_below": -1.0}, ValueError, r"norm_below is -1\.0, expected more than 0"),
        ({"norm_below": float("nan")}, ValueError, "norm_below is nan"),
        ({"predicate": 3}, TypeError, "predicate is 3, expected a function"),
        ({"predicate": lambda ids, _: ids}, TypeError, r"predicate returned torch\.int64 \(9,\)"),
        ({"predicate": lambda ids, _: ids[:2] > 0}, TypeError, r"predicate returned torch\.bool"),
        ({"score_below": 5, "batch_size": 3}, ValueError, "batch_size is 3, expected at least 4"),
    ],
)
def test_wrong_conditions(
    conditions: dict[str, object], error: type[Exception], message: str
) -> None:
    group = make_group(max_rows=100)
    group.insert(0, torch.arange(9))

    def call() -> object:
        return group.remove(0, **conditions)  # type: ignore[arg-type]

    with pytest.raises(error, match=message):
        call()
    assert unchanged(group, call) == []


def test_conditions_that_need_scores() -> None:
    group = make_group("none")
    for condition in ("not_seen_for", "score_below"):
        with pytest.raises(ValueError, match=rf"{condition} needs scores.*score='step'"):
            group.remove(0, **{condition: 5})  # type: ignore[arg-type]


# -- statistics ----------------------------------------------------------------------------------


def test_statistics_say_what_has_happened() -> None:
    group = make_group()
    step(group, torch.arange(100))
    group.insert(1, torch.arange(7))
    group.remove(0, predicate=lambda ids, _: ids < 30)
    group.insert(0, torch.arange(200, 210))
    a, b = group.usage.tables(wait=True)["a"], group.usage.tables(wait=True)["b"]
    assert (a.size, a.inserted, a.removed, b.size, b.removed) == (80, 110, 30, 7, 0)
    assert a.slots >= 143  # 100 ids at load 0.7
    assert a.load == 80 / a.slots <= 0.7
    assert a.growths >= 1
    assert b.growths == 0
    assert a.row_bytes == 80 * (4 * 4 + 4 + 4 * 4)  # weights, generation, Adagrad's sums
    assert a.index_bytes == a.slots * 24  # key, handle, score
    assert group.usage.memory()["index"] >= a.index_bytes + b.index_bytes
    assert set(a.as_dict()) >= {"size", "load", "removed"}


def test_statistics_are_logged_by_table() -> None:
    logged: dict[tuple[str, int], float] = {}

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            logged[tag, global_step] = scalar_value

    group = make_group()
    step(group, torch.arange(5))
    group.usage.log_to(Writer())
    group.usage.log_to(Writer(), step=70)
    for at in (1, 70):
        assert logged["a/size", at] == 5
        assert logged["b/size", at] == 0
        assert logged["a/load", at] == group.usage.tables(wait=True)["a"].load


def test_rows_are_filled() -> None:
    group = make_group()
    step(group, torch.arange(5))
    group.insert(0, torch.arange(5, 8))  # not trained yet
    group.insert(1, torch.arange(3))
    other = group.read(1, torch.arange(3))
    group.fill(0, 2.5)
    assert torch.equal(group.read(0, torch.arange(8)), torch.full((8, 4), 2.5))
    assert torch.equal(group.read(1, torch.arange(3)), other)


def test_only_what_has_changed_is_exported() -> None:
    policy = td.Policy(score=("frequency", "timestamp"))
    group = td.TableGroup([td.TableConfig("t", 4, policy=policy)], optimizer=None, seed=1)
    group.clock.set_now(0)
    for now in range(5):
        group.insert(0, torch.arange(now, 10))
        group.step(now=10 * (now + 1))

    def ids(**arguments: Any) -> set[int]:
        return {int(id) for batch in group.export(0, **arguments) for id in batch.ids}

    assert ids(since=30, score="timestamp") == set(range(3, 10))
    assert ids(since=4, score="step") == set(range(4, 10))
    assert ids(since=5) == set(range(4, 10))  # the frequency
    assert ids(since=6) == set()
    with pytest.raises(ValueError, match="does not keep score 'custom'"):
        ids(since=1, score="custom")


# -- tables by name ------------------------------------------------------------------------------
