"""Split mode: gradients wait for optimizer.step(); accumulation, compile, weights, copies."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from execution import memory_in_use, threads
from group_calls import (
    bag_lookup,
    call_of,
    differences,
    flat_call,
    raises_in_step,
    snapshot,
)
from interrupting import at_line
from seeding import seeded
from split_modules import DIM, bag, embedding, train
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.nn.forgotten_steps import FORGOTTEN_SPLIT_STEPS
from torch_dynemb.ops.columns import Pooling, RowClock
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.any_device


CONFIGS: dict[str, OptimizerConfig] = {
    "sgd": td.SGD(lr=0.1, weight_decay=0.1),
    "momentum": td.MomentumSGD(lr=0.1),
    "rowwise_adagrad": td.RowWiseAdagrad(lr=0.1),
    "adam": td.Adam(lr=0.01),
    "adam row steps": td.Adam(lr=0.01, row_steps=True),
    "lamb": td.LAMB(lr=0.01),
    "ftrl": td.Ftrl(lr=0.1, l1=0.1),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def rows_and_state(module: Any) -> dict[str, Tensor]:
    group = module.group
    group.materialize()
    names = ("weights", "generations", "state")
    return {f"{n}{i}": t.clone() for n in names for i, t in enumerate(getattr(group.rows, n))}


# -- accumulation ----------------------------------------------------------------------------------


@every_config
def test_two_micro_batches_are_one_batch_bit_for_bit(config: OptimizerConfig) -> None:
    """Every id occurs at most once in each."""
    split, fused = bag(config, split=True), bag(config)
    for step in range(6):
        generator = seeded(step)
        halves = [torch.randperm(40, generator=generator)[:15].reshape(5, 3) for _ in range(2)]
        gradients = [torch.randn(5, DIM, generator=generator) for _ in range(2)]
        for ids, gradient in zip(halves, gradients, strict=True):
            train(split, ids, gradient)
        split.optimizer.step()
        train(fused, torch.cat(halves), torch.cat(gradients))
        fused.optimizer.step()
    assert differences(rows_and_state(split), rows_and_state(fused)) == []
    assert split.group.rows.row_clock[0] == 6


@every_config
def test_many_micro_batches_are_one_batch_to_rounding(config: OptimizerConfig) -> None:
    split, fused = bag(config, split=True), bag(config)
    for step in range(4):
        generator = seeded(step)
        ids = torch.randint(30, (20, 4), generator=generator)
        gradient = torch.randn(20, DIM, generator=generator)
        for part in range(5):
            chosen = slice(4 * part, 4 * part + 4)
            train(split, ids[chosen], gradient[chosen])
        split.optimizer.step()
        train(fused, ids, gradient)
        fused.optimizer.step()
    ids = torch.arange(30)
    torch.testing.assert_close(split.group.read(0, ids), fused.group.read(0, ids))


def test_one_backward_equals_fused_bit_for_bit() -> None:
    split, fused = bag(td.Adam(lr=0.01), split=True), bag(td.Adam(lr=0.01))
    for step in range(4):
        generator = seeded(step)
        ids = torch.randint(30, (20, 4), generator=generator)
        gradient = torch.randn(20, DIM, generator=generator)
        for module in (split, fused):
            train(module, ids, gradient)
            module.optimizer.step()
    assert differences(rows_and_state(split), rows_and_state(fused)) == []


def test_large_sums_equal_fused_bit_for_bit() -> None:
    # from 8 MiB on they are written past the caches
    ids = torch.arange(33_000).view(-1, 2)
    ids[0] = ids[1]
    gradient = torch.randn(len(ids), 64, generator=seeded(0))
    split, fused = (
        td.DynamicEmbeddingBag(
            64, mode="sum", optimizer=td.SGD(lr=0.1), name="large", max_rows=40_000, split=mode
        )
        for mode in (True, False)
    )
    for module in (split, fused):
        train(module, ids, gradient)
        module.optimizer.step()
    assert differences(rows_and_state(split), rows_and_state(fused)) == []


def test_rows_wait_for_step() -> None:
    module = embedding(td.SGD(lr=1.0))
    ids = torch.arange(4)
    before = module.group.read(0, ids)
    train(module, ids, torch.ones(4, DIM))
    assert torch.equal(module.group.read(0, ids), before)
    assert torch.equal(module(ids), before)
    module.optimizer.step()
    assert torch.equal(module.group.read(0, ids), before - 1)
    module.optimizer.step()  # nothing is left to apply
    assert torch.equal(module.group.read(0, ids), before - 1)


def test_an_interrupted_step_applies_gradients_once() -> None:
    """Ctrl-C at every line of step(), and step() again: what waits is applied, and forgotten."""
    module = embedding(td.SGD(lr=1.0))
    ids = torch.arange(4)

    def waiting() -> Tensor:
        before = module.group.read(0, ids)
        train(module, ids, torch.ones(4, DIM))
        return before

    waiting()
    lines = at_line(module.optimizer.step, 0)
    assert lines > 10
    for line in range(1, lines + 1):
        before = waiting()
        at_line(module.optimizer.step, line)
        module.optimizer.step()
        assert torch.equal(module.group.read(0, ids), before - 1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_table_used_several_times_in_a_forward(count: int) -> None:
    """Two lookups of one table, one backward: the sum of both."""
    module = embedding(td.SGD(lr=1.0))
    ids = torch.arange(5)
    before = module.group.read(0, ids)
    with threads(count):
        output = module(ids) * 2 + module(ids.flip(0)).flip(0) * 3 + module(ids)
        output.sum().backward()
        module.optimizer.step()
    assert torch.equal(module.group.read(0, ids), before - 6)


def test_several_tables_and_dims() -> None:
    tables = [td.TableConfig("a", 4), td.TableConfig("b", 8), td.TableConfig("c", 4)]
    modules = [
        td.DynamicEmbeddingBagCollection(
            tables, optimizer=td.Adam(lr=0.1), split=split, max_rows=100
        )
        for split in (True, False)
    ]
    for step in range(3):
        generator = seeded(step)
        ids = {name: torch.randint(20, (6, 3), generator=generator) for name in "abc"}
        gradient = torch.randn(6, 16, generator=generator)
        for module in modules:
            module(ids).backward(gradient)
            module.optimizer.step()
    assert differences(rows_and_state(modules[0]), rows_and_state(modules[1])) == []


def test_a_step_counts_for_every_table() -> None:
    """Fused mode counts the backwards that look a table up, split mode its steps."""
    group = td.TableGroup(
        [td.TableConfig("a", 2), td.TableConfig("b", 2)],
        optimizer=td.Adam(),
        max_rows=10,
        split=True,
    )
    optimizer = td.SplitOptimizer(group.names, td.Adam(), rows=group.rows, end_step=group.step)
    for _ in range(2):
        bag_lookup(group, flat_call(group, 0, torch.arange(3))).sum().backward()
    assert group.rows.row_clock.tolist() == [0, 0, 0, 2, 0, 0]
    assert optimizer.updates_since_step() == 2
    optimizer.step()
    assert group.rows.row_clock.tolist() == [1, 1, 1, 0, 0, 0]


def test_a_step_after_one_that_was_skipped_and_scaled() -> None:
    """What GradScaler set does not stay, nor does a copy, which has another optimizer, get it."""
    module, ids = embedding(td.SGD(lr=1.0)), torch.arange(4)
    train(module, ids, torch.ones(4, DIM))
    module.optimizer.step()
    before = module.group.read(0, ids)
    train(module, ids, torch.ones(4, DIM))
    module.optimizer.found_inf, module.optimizer.grad_scale = torch.ones(1), torch.full((1,), 2.0)
    module.optimizer.step()
    del module.optimizer.found_inf, module.optimizer.grad_scale
    assert torch.equal(module.group.read(0, ids), before)
    for same in (copy.deepcopy(module), module):
        train(same, ids, torch.ones(4, DIM))
        same.optimizer.step()
        assert torch.equal(same.group.read(0, ids), before - 1)


def test_zero_grad_discards() -> None:
    module = embedding(td.SGD(lr=1.0))
    ids = torch.arange(4)
    before = module.group.read(0, ids)
    train(module, ids, torch.ones(4, DIM))
    module.optimizer.zero_grad()
    module.optimizer.step()
    assert torch.equal(module.group.read(0, ids), before)


def test_bits_do_not_depend_on_threads() -> None:
    states = []
    for count in (1, 2):
        module = bag(td.RowWiseAdagrad(lr=0.1), split=True, max_rows=5000)
        with threads(count):
            for step in range(3):
                generator = seeded(step)
                for _ in range(3):
                    ids = torch.randint(3000, (400, 20), generator=generator)
                    train(module, ids, torch.randn(400, DIM, generator=generator))
                module.optimizer.step()
        states.append(snapshot(module.group))
    assert differences(*states) == []


def test_merged_entries() -> None:
    """Ascending by row, in the order of the lookups, as many as there are rows."""
    module = embedding(td.SGD(lr=1.0))
    for ids in ([5, 6, 7], [7, 9, 5], [7]):
        train(module, torch.tensor(ids), torch.ones(len(ids), DIM))
    pending = ops.PendingGradients.of(module.group.rows.pending)
    assert pending.counts.tolist() == [[7, 3]]
    ops.merge_grad_(pending, module.group.rows)
    assert pending.counts.tolist() == [[4, 1]]
    assert (pending.handles[0][:4] >> 28).tolist() == [0, 1, 2, 3]
    assert pending.ids[0][:4].tolist() == [5, 6, 7, 9]
    assert pending.gradients[0][:4, 0].tolist() == [2, 1, 3, 1]


def test_the_buffer_merges_when_it_is_full() -> None:
    module = embedding(td.SGD(lr=1.0), max_rows=10)
    ids = torch.arange(10)
    before = module.group.read(0, ids)
    for _ in range(7):
        train(module, ids, torch.ones(10, DIM))
    module.optimizer.step()
    assert torch.equal(module.group.read(0, ids), before - 7)


def test_gradients_of_rows_that_got_another_owner_are_dropped() -> None:
    module = embedding(td.SGD(lr=1.0))
    train(module, torch.tensor([1, 2]), torch.ones(2, DIM))
    module.group.erase(0, torch.tensor([1]))
    train(module, torch.tensor([3, 2]), torch.ones(2, DIM))  # 3 gets the row of 1
    fresh = module.group.read(0, torch.tensor([3]))
    module.optimizer.step()
    assert torch.equal(module.group.read(0, torch.tensor([3])), fresh - 1)
    assert module.group.usage.stale_gradients() == 1
    assert 1 not in module


def test_erased_ids_leave_no_gradients() -> None:
    """Their rows are free, and no other id has come yet."""
    module = embedding(td.SGD(lr=1.0))
    for ids in ([1, 2], [2, 3]):
        train(module, torch.tensor(ids), torch.full((2, DIM), 2.0))
    module.group.erase(0, torch.tensor([[1, 7], [3, 1]]))
    module.group.insert_or_assign(0, torch.tensor([1]), torch.zeros(1, DIM))
    before = module.group.read(0, torch.tensor([1, 2]))
    norm = td.clip_grad_norm_(module, 1000.0)
    assert norm.item() == pytest.approx(4 * DIM**0.5)  # of 2 alone
    module.optimizer.step()
    expected = before - torch.tensor([[0.0], [4.0]])
    assert torch.equal(module.group.read(0, torch.tensor([1, 2])), expected)
    assert module.group.usage.stale_gradients() == 2


# -- compiled --------------------------------------------------------------------------------------


@pytest.mark.traced
def test_compiled_equals_eager() -> None:
    torch._dynamo.reset()
    modules = [bag(td.Adam(lr=0.01), split=True) for _ in range(2)]
    with torch._inductor.config.patch(force_disable_caches=True):
        functions = [modules[0], torch.compile(modules[1], fullgraph=True)]
        for step in range(3):
            for part in range(2):
                generator = seeded(10 * step + part)
                ids = torch.randint(40, (6, 3), generator=generator)
                gradient = torch.randn(6, DIM, generator=generator)
                for function in functions:
                    function(ids).backward(gradient)
            for module in modules:
                module.optimizer.step()
    assert differences(snapshot(modules[0].group), snapshot(modules[1].group)) == []
    torch._dynamo.reset()


# -- weights of ids, copies, misuse ----------------------------------------------------------------


def test_weights_of_ids_get_gradients() -> None:
    module = bag(td.SGD(lr=1.0), split=True)
    ids, weights = torch.tensor([[1, 2]]), torch.tensor([[2.0, 3.0]], requires_grad=True)
    rows = module.group.read(0, torch.tensor([1, 2]))
    module(ids, per_sample_weights=weights).sum().backward()
    torch.testing.assert_close(weights.grad, rows.sum(1)[None])
    module.optimizer.step()
    torch.testing.assert_close(
        module.group.read(0, torch.tensor([1, 2])), rows - torch.tensor([[2.0], [3.0]])
    )


def test_gradients_of_weights_need_the_rows_of_the_forward() -> None:
    module = bag(td.SGD(lr=1.0), split=True)
    ids, weights = torch.tensor([[1, 2]]), torch.ones(1, 2, requires_grad=True)
    output = module(ids, per_sample_weights=weights)
    train(module, ids, torch.ones(1, DIM))
    module.optimizer.step()
    with raises_in_step(module.group, r"per_sample_weights no longer fit.*before optimizer"):
        output.sum().backward()


def test_gradients_of_weights_may_be_those_of_the_rows_by_then() -> None:
    module = bag(td.SGD(lr=1.0, delayed_gradients="apply"), split=True)
    ids, weights = torch.tensor([[1, 2]]), torch.ones(1, 2, requires_grad=True)
    output = module(ids, per_sample_weights=weights)
    train(module, ids, torch.ones(1, DIM))
    module.optimizer.step()
    output.sum().backward()
    rows = module.group.read(0, ids[0])
    torch.testing.assert_close(weights.grad, rows.sum(1)[None])
    module.optimizer.step()
    torch.testing.assert_close(module.group.read(0, ids[0]), rows - 1)


def test_lookups_before_a_step_may_go_backward_after_it() -> None:
    """As with nn.Embedding: the gradient of a sum does not depend on the rows."""
    module = embedding(td.SGD(lr=1.0))
    ids = torch.arange(3)
    before = module.group.read(0, ids)
    output = module(ids)
    train(module, ids, torch.ones(3, DIM))
    module.optimizer.step()
    output.sum().backward()
    module.optimizer.step()
    assert torch.equal(module.group.read(0, ids), before - 2)


def test_copies_and_files_stay_split() -> None:
    module = embedding(td.Adam(lr=0.1))
    ids = torch.arange(4)
    train(module, ids, torch.ones(4, DIM))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert isinstance(twin.optimizer, td.SplitOptimizer)
        (stand_in,) = twin.optimizer.stand_ins()
        assert stand_in.grad is None  # a module's state excludes gradients
        before = twin.group.read(0, ids)
        train(twin, ids, torch.ones(4, DIM))
        twin.optimizer.step()
        assert not torch.equal(twin.group.read(0, ids), before)
    fused = embedding(td.Adam(lr=0.1), split=False)
    fused.load_state_dict(module.state_dict())
    assert torch.equal(fused.group.read(0, ids), module.group.read(0, ids))
    module.load_state_dict(fused.state_dict())
    assert module.optimizer.stand_ins()[0].grad is None


def test_forgotten_steps_are_reported() -> None:
    if torch.get_default_device().type == "cuda":
        pytest.skip("a GPU's backwards are counted when the module is saved or evaluated")
    module = embedding(td.SGD(lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(FORGOTTEN_SPLIT_STEPS):
            train(module, torch.arange(2), torch.ones(2, DIM))
    with pytest.warns(RuntimeWarning, match=r"256 backwards have gathered gradients since the l"):
        train(module, torch.arange(2), torch.ones(2, DIM))


def test_add_table_and_gradients() -> None:
    tables = [td.TableConfig("a", 4)]
    module = td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=1.0), split=True)
    module({"a": torch.tensor([[1]])}).sum().backward()
    module.optimizer.step()
    module.add_table(td.TableConfig("b", 8))
    before = module.group.read(1, torch.tensor([1]))
    module({"a": torch.tensor([[1]]), "b": torch.tensor([[1]])}).sum().backward()
    assert [stand_in.grad is None for stand_in in module.optimizer.stand_ins()] == [False, False]
    module.optimizer.step()
    assert torch.equal(module.group.read(1, torch.tensor([1])), before - 1)


def test_pooled_gradients_wait_per_lookup_not_per_occurrence() -> None:
    group = td.TableGroup(
        [td.TableConfig("a", 3)], optimizer=td.SGD(lr=1.0), max_rows=100, split=True
    )
    call = call_of(group, [(0, [[1, 1, 2], [2], []])])
    bag_lookup(group, call, pooling=Pooling.MEAN).backward(torch.ones(3, 3))
    pending = ops.PendingGradients.of(group.rows.pending)
    assert pending.counts.tolist() == [[2, 1]]
    torch.testing.assert_close(pending.gradients[0][:2, 0], torch.tensor([2 / 3, 4 / 3]))
    assert group.rows.row_clock[-4 + RowClock.UPDATES] == 0


@pytest.mark.alone
def test_compact_gives_the_room_of_gradients_back() -> None:
    module = td.DynamicEmbedding(256, optimizer=td.SGD(lr=1.0), split=True)
    ids = torch.arange(40_000)
    module(ids).sum().backward()
    module.optimizer.step()
    before = memory_in_use()
    module.group.compact()
    assert before - memory_in_use() > 30_000_000  # of 41 MB of gradients
    module(torch.tensor([1])).sum().backward()
    module.optimizer.step()


def test_a_step_with_a_wrong_time_does_nothing() -> None:
    module = td.DynamicEmbedding(
        4, optimizer=td.SGD(lr=1.0), split=True, initializer=td.Constant(0.0)
    )
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"now: seconds is 1.5, expected int"):
        module.optimizer.step(now=1.5)
    with pytest.raises(ValueError, match="now: seconds is -1, expected at least 0"):
        module.optimizer.step(now=-1)
    assert not module.eval()(torch.tensor([1])).any()
