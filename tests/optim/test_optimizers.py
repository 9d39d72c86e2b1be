"""Row optimizers: against torch.optim, against float64 formulas; hyper-parameters and steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from group_calls import (
    bag_lookup,
    call_of,
    differences,
    flat_call,
    raises_in_step,
    snapshot,
    train,
    unchanged,
)
from optimizer_groups import OPTIMIZERS, exact_gradient, make_group, plain_optimizers
from oracle import Oracle
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import Hyper, Table
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.any_device

STEPS = 50
every_optimizer = pytest.mark.parametrize("config", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())

# -- torch.optim ---------------------------------------------------------------------------------

DENSE: dict[str, tuple[OptimizerConfig, Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "sgd": (
        OPTIMIZERS["sgd decay"],
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    ),
    "momentum": (
        OPTIMIZERS["momentum_sgd"],
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    ),
    "nesterov": (
        OPTIMIZERS["momentum_sgd decay"],
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.5, nesterov=True, weight_decay=0.1),
    ),
    "amsgrad": (
        OPTIMIZERS["amsgrad decay"],
        lambda p: torch.optim.Adam(
            p, lr=0.01, betas=(0.5, 0.75), weight_decay=0.1, eps=1e-3, amsgrad=True
        ),
    ),
    "adagrad": (
        OPTIMIZERS["adagrad decay"],
        lambda p: torch.optim.Adagrad(
            p, lr=0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-3
        ),
    ),
    "adagrad lr decay": (
        OPTIMIZERS["adagrad lr decay"],
        lambda p: torch.optim.Adagrad(p, lr=0.5, lr_decay=0.25, maximize=True),
    ),
    "dampened": (
        OPTIMIZERS["momentum dampened"],
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, dampening=0.25, weight_decay=0.1),
    ),
    "rmsprop": (OPTIMIZERS["rmsprop"], lambda p: torch.optim.RMSprop(p, lr=0.01)),
    "rmsprop momentum": (
        OPTIMIZERS["rmsprop decay"],
        lambda p: torch.optim.RMSprop(
            p, lr=0.01, alpha=0.75, momentum=0.5, weight_decay=0.1, eps=1e-3
        ),
    ),
    "adadelta": (td.Adadelta(), torch.optim.Adadelta),
    "adadelta decay": (
        OPTIMIZERS["adadelta decay"],
        lambda p: torch.optim.Adadelta(p, lr=0.5, rho=0.75, weight_decay=0.1, eps=1e-3),
    ),
    "adam": (OPTIMIZERS["adam"], lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam decay": (
        OPTIMIZERS["adam decay"],
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.5, 0.75), weight_decay=0.1, eps=1e-3),
    ),
    "adamw": (
        OPTIMIZERS["adamw decay"],
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.0, 0.99), weight_decay=0.2, eps=1e-3),
    ),
}


@pytest.mark.parametrize(("config", "make_reference"), DENSE.values(), ids=DENSE.keys())
def test_equals_torch_where_all_rows_are_touched(
    config: OptimizerConfig, make_reference: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    group = make_group(config)
    ids = torch.arange(40)
    group.insert(0, ids)  # so that row i is of id i
    weight = group.read(0, ids).double().requires_grad_()
    reference = make_reference([weight])
    for step in range(STEPS):
        gradient = torch.randn(40, 6, generator=seeded(step))
        weight.grad = gradient.double()
        reference.step()
        order = torch.randperm(40, generator=seeded(step))
        train(group, 0, ids[order], gradient[order])
    torch.testing.assert_close(group.read(0, ids).double(), weight.detach(), rtol=1e-5, atol=1e-6)
    states = reference.state[weight]
    for name, tensor in zip([s.name for s in config.state], group.rows.state, strict=True):
        torch.testing.assert_close(tensor[:40].double(), states[name], rtol=2e-5, atol=2e-6)


SPARSE: dict[str, tuple[OptimizerConfig, Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "sgd": (OPTIMIZERS["sgd"], lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (OPTIMIZERS["adagrad"], lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "adagrad lr decay": (
        td.Adagrad(lr=0.5, lr_decay=0.25),
        lambda p: torch.optim.Adagrad(p, lr=0.5, lr_decay=0.25),
    ),
    # SparseAdam does not correct the root that eps is added to: no eps, no difference
    "adam": (td.Adam(lr=0.01, eps=1e-20), lambda p: torch.optim.SparseAdam(p, lr=0.01, eps=1e-20)),
}


@pytest.mark.parametrize(("config", "make_reference"), SPARSE.values(), ids=SPARSE.keys())
def test_equals_torch_with_sparse_gradients(
    config: OptimizerConfig, make_reference: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    group = make_group(config)
    ids = torch.arange(40)
    weight = torch.nn.Parameter(group.read(0, ids).double())
    reference = make_reference([weight])
    for step in range(STEPS):
        generator = seeded(step)
        batch = torch.randint(40, (25,), generator=generator)  # with repeated ids
        gradient = torch.randn(25, 6, generator=generator)
        with torch.sparse.check_sparse_tensor_invariants(True):
            weight.grad = torch.sparse_coo_tensor(batch[None], gradient.double(), weight.shape)
            reference.step()
        train(group, 0, batch, gradient)
    torch.testing.assert_close(group.read(0, ids).double(), weight.detach(), rtol=1e-5, atol=1e-6)


# -- float64 formulas ----------------------------------------------------------------------------


@every_optimizer
def test_equals_float64_formula(config: OptimizerConfig) -> None:
    """Repeated ids, ids that are only read, ids that are erased and come back."""
    group = make_group(config, (6, 6, 5))
    oracle = Oracle(group)
    random = np.random.default_rng(3)
    for step in range(STEPS):
        features = [(t, [random.integers(0, 80, 3).tolist() for _ in range(10)]) for t in (0, 1, 2)]
        if step % 4 == 1:
            del features[step % 3]  # a table that is not looked up does not count the step
        call = call_of(group, features)
        flat = [(t, [id for bag in bags for id in bag]) for t, bags in features]
        if step % 3 == 2:
            handles = group.find(call.ids, call.offsets, call.tables).handles
        else:
            handles = group.find_or_insert(call.ids, call.offsets, call.tables)
            assert handles.tolist() == oracle.find_or_insert(flat)
        gradient = exact_gradient(10, sum(call.dims), seed=step)
        bag_lookup(group, call, handles=handles).backward(gradient)
        sums: dict[tuple[int, int], np.ndarray] = {}
        columns = np.split(gradient.double().cpu().numpy(), np.cumsum(call.dims)[:-1], axis=1)
        for (table, bags), part in zip(features, columns, strict=True):
            for bag, row in zip(bags, part, strict=True):
                for id in bag:
                    sums[table, id] = sums.get((table, id), 0.0) + row
        oracle.update(sums, set(call.tables))
        if step % 5 == 4:
            gone = random.integers(0, 80, 15).tolist()
            assert group.erase(step % 3, torch.tensor(gone)) == oracle.erase(step % 3, gone)
    assert group.rows.row_clock[:3].tolist() == oracle.steps
    group.materialize()
    for table in range(3):
        ids = list(oracle.handles[table])
        assert len(ids) > 40
        owned = [oracle.owned(table, id) for id in ids]
        rows = group.read(table, torch.tensor(ids))
        np.testing.assert_allclose(rows.cpu(), [row.weight for row in owned], rtol=2e-5, atol=5e-6)
        slab = oracle.slab[table]
        for k in range(len(config.state)):
            state = group.rows.state[2 * k + slab].reshape(1000, -1)
            written = state[[row.handle >> 28 for row in owned]]
            expected = [row.state[k] for row in owned]
            np.testing.assert_allclose(written.cpu(), expected, rtol=2e-5, atol=5e-6)


# -- hyper-parameters and steps ------------------------------------------------------------------


@plain_optimizers
def test_tables_have_their_own_hyper_parameters(config: OptimizerConfig) -> None:
    """Two tables in one group, and each alone in a group with its hyper-parameters."""
    together = make_group(config, (4, 4))
    apart = [make_group(config, (4, 4)) for _ in range(2)]
    second = config.hyper_row()
    second[Hyper.LR] *= 3
    second[Hyper.WEIGHT_DECAY] = 0.25
    second[Hyper.EPS] = 1e-2
    second[Hyper.BETA1] *= 0.5
    together.rows.hyper[1] = torch.tensor(second)
    apart[1].rows.hyper[:] = torch.tensor(second)
    ids = list(range(10))
    for step in range(5):
        gradient = exact_gradient(10, 8, seed=step)
        bags = [[id] for id in ids]
        bag_lookup(together, call_of(together, [(0, bags), (1, bags)])).backward(gradient)
        for table, group in enumerate(apart):
            half = gradient[:, 4 * table : 4 * table + 4]
            bag_lookup(group, call_of(group, [(table, bags)])).backward(half)
    for table, group in enumerate(apart):
        tensor = torch.tensor(ids)
        assert torch.equal(together.read(table, tensor), group.read(table, tensor))
    assert not torch.equal(apart[0].read(1, tensor), apart[1].read(1, tensor))


def test_moments_keep_the_digits_of_one_minus_beta() -> None:
    """1 - 0.999 is rounded once, to single precision; 1 - float(0.999) would be off by 1.3e-5."""
    group = make_group(td.Adam(betas=(0.99, 0.9999)), (2,))
    train(group, 0, torch.tensor([1]), torch.ones(1, 2))
    moments = torch.stack([state[0] for state in group.rows.state])
    torch.testing.assert_close(moments[0], torch.full((2,), 0.01), rtol=2e-7, atol=0)
    torch.testing.assert_close(moments[1], torch.full((2,), 0.0001), rtol=2e-7, atol=0)


def test_learning_rate_change_takes_effect_at_the_next_backward() -> None:
    group = make_group(td.SGD(lr=1.0), (2,))
    ids = torch.tensor([3])
    before = group.read(0, ids)
    output = bag_lookup(group, flat_call(group, 0, ids))
    group.rows.hyper.data[0, Hyper.LR] = 0.5
    output.backward(torch.ones(1, 2))
    assert torch.equal(group.read(0, ids), before - 0.5)


def test_step_counts_the_calls_that_look_a_table_up() -> None:
    group = make_group(td.Adam(lr=0.1), (4, 4, 3))
    for tables in ([0], [0, 1], [0], [2, 0, 2]):
        features = [(t, [[1], [2]]) for t in tables]
        call = call_of(group, features)
        bag_lookup(group, call).backward(torch.ones(2, sum(call.dims)))
    empty = call_of(group, [(1, [[], []])])
    bag_lookup(group, empty).backward(torch.ones(2, 4))
    assert group.rows.row_clock.tolist() == [4, 2, 1, 5, 5, 0, 0]


@plain_optimizers
def test_lookup_before_an_update_cannot_update_after_it(config: OptimizerConfig) -> None:
    group = make_group(config)
    call = flat_call(group, 0, torch.arange(5))
    first, second = bag_lookup(group, call), bag_lookup(group, call)
    second.sum().backward(retain_graph=True)
    message = r"updated between this lookup's forward .*use split mode.*delayed_gradients"
    for output in (first, second):
        with raises_in_step(group, message):
            output.sum().backward(retain_graph=True)
        assert unchanged(group, lambda o=output: o.sum().backward(retain_graph=True)) == []


@plain_optimizers
def test_delayed_gradients_update_the_rows_as_they_are_by_then(config: OptimizerConfig) -> None:
    late = make_group(replace(config, delayed_gradients="apply"))
    in_turn = make_group(config)
    call = flat_call(late, 0, torch.arange(5))
    gradients = [exact_gradient(5, 6, seed=seed) for seed in range(3)]
    # backwards overtake each other, and one runs twice
    first, second = bag_lookup(late, call), bag_lookup(late, call)
    second.backward(gradients[0])
    first.backward(gradients[1], retain_graph=True)
    first.backward(gradients[2])
    in_turn.find_or_insert(call.ids, call.offsets, call.tables)
    for gradient in gradients:
        bag_lookup(in_turn, call).backward(gradient)
    assert torch.equal(late.read(0, call.ids), in_turn.read(0, call.ids))
    for one, other in zip(late.rows.state, in_turn.rows.state, strict=True):
        assert torch.equal(one, other)
    assert late.rows.row_clock.tolist() == in_turn.rows.row_clock.tolist()


def test_delayed_gradients_of_a_row_that_was_given_away_are_dropped() -> None:
    group = make_group(td.SGD(lr=1.0, delayed_gradients="apply"))
    kept, lost, later = torch.tensor([1]), torch.tensor([2]), torch.tensor([3])
    output = bag_lookup(group, flat_call(group, 0, torch.cat([kept, lost])))
    group.erase(0, lost)
    bag_lookup(group, flat_call(group, 0, later)).backward(torch.zeros(1, 6))
    before = group.read(0, torch.cat([kept, later]))
    output.backward(torch.ones(2, 6))
    expected = before - torch.tensor([[1.0], [0.0]])
    assert torch.equal(group.read(0, torch.cat([kept, later])), expected)
    assert group.usage.stale_gradients() == 1


def test_no_optimizer_leaves_rows_alone() -> None:
    group = make_group(td.SGD(lr=1.0))
    call = flat_call(group, 0, torch.arange(5))
    output = bag_lookup(group, call, optimizer=-1)
    before = snapshot(group)
    output.sum().backward()
    output = bag_lookup(group, call, optimizer=-1)
    output.sum().backward(retain_graph=True)
    output.sum().backward()
    assert differences(before, snapshot(group)) == ["tables"]
    found = group.index.tables[0, Table.FOUND] - before["tables"][0, Table.FOUND]
    assert found == 5
