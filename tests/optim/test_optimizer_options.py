"""What all optimizers can do: clip, scale, look for NaN; optimizers that come or change late."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from group_calls import bag_lookup, differences, flat_call, raises_in_step, snapshot
from seeding import seeded
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.ops.columns import Hyper, RowClock
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.any_device

DIM = 20
IDS = torch.arange(6)
BAD = torch.tensor([float("nan"), float("inf"), -float("inf")])


def make_group(config: OptimizerConfig, *, split: bool = False) -> td.TableGroup:
    tables = [td.TableConfig(name, DIM, initializer=td.Uniform(-1.0, 1.0)) for name in "ab"]
    return td.TableGroup(tables, optimizer=config, max_rows=200, seed=3, split=split)


def step(group: td.TableGroup, gradient: Tensor, table: int = 0) -> None:
    bag_lookup(group, flat_call(group, table, IDS)).backward(gradient)


def bad_gradient() -> Tensor:
    """Rows 1, 3 and 4 have a value that is not finite, in different columns."""
    gradient = torch.randn(len(IDS), DIM, generator=seeded(1))
    for row, column, value in zip((1, 3, 4), (0, 17, 9), BAD, strict=True):
        gradient[row, column] = value
    return gradient


# -- gradients that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [td.SGD, td.RowWiseAdagrad, td.Adam, td.LAMB, td.PartialRowWiseAdam],
    ids=lambda make: make.__name__,
)
def test_skip_leaves_the_rows_alone_and_counts_them(make: Callable[..., OptimizerConfig]) -> None:
    group, clean = make_group(make(lr=0.1, non_finite="skip")), make_group(make(lr=0.1))
    optimizer = td.FusedOptimizer(group.names, make(lr=0.1), rows=group.rows, end_step=group.step)
    before = group.read(0, IDS)
    step(group, bad_gradient())
    good = torch.tensor([0, 2, 5])
    step(clean, torch.where(bad_gradient().isfinite(), bad_gradient(), 0.0))
    assert torch.equal(group.read(0, good), clean.read(0, good))
    assert torch.equal(group.read(0, IDS[[1, 3, 4]]), before[[1, 3, 4]])
    assert optimizer.non_finite_gradients() == 3
    assert int((group.rows.generations[0] > 0).sum()) == 3  # the others were not even written
    step(group, bad_gradient())
    assert optimizer.non_finite_gradients() == 6


def test_propagate_is_the_default() -> None:
    group = make_group(td.SGD(lr=0.1))
    step(group, bad_gradient())
    rows = group.read(0, IDS)
    assert (~rows.isfinite()).nonzero().tolist() == [[1, 0], [3, 17], [4, 9]]
    assert group.rows.row_clock[2 + RowClock.NON_FINITE] == 0


@pytest.mark.parametrize("split", [False, True])
def test_raise_changes_nothing(split: bool) -> None:
    config = td.Adam(lr=0.1, non_finite="raise")
    group = make_group(config, split=split)
    kind = td.SplitOptimizer if split else td.FusedOptimizer
    optimizer = kind(group.names, config, rows=group.rows, end_step=group.step)
    step(group, torch.ones(len(IDS), DIM))
    optimizer.step()
    before = snapshot(group)
    message = r"gradient of (id \d of )?table '\w+' has NaN or infinity, and non_finite is 'raise'"
    with raises_in_step(group, message):
        step(group, bad_gradient())
        optimizer.step()
    changed = differences(before, snapshot(group))
    assert not any(name.startswith(("weights", "state", "generations")) for name in changed)
    optimizer.zero_grad()
    step(group, torch.ones(len(IDS), DIM))
    optimizer.step()
    assert group.rows.row_clock[0] == 2


def test_only_the_tables_that_say_so() -> None:
    """The policy is of the table: its column of hyper."""
    group = make_group(td.SGD(lr=0.1, non_finite="skip"))
    group.rows.hyper.data[1, Hyper.NON_FINITE] = 0
    for table in (0, 1):
        step(group, bad_gradient(), table)
    assert bool(group.read(0, IDS).isfinite().all())
    assert not bool(group.read(1, IDS).isfinite().all())


# -- scaling and clipping --------------------------------------------------------------------------


def test_down_scale_by_divides() -> None:
    plain, scaled = make_group(td.Adam(lr=0.1)), make_group(td.Adam(lr=0.1))
    scaled.rows.hyper.data[:, Hyper.DOWN_SCALE_BY] = 1024
    gradient = torch.randn(len(IDS), DIM, generator=seeded(1))
    step(plain, gradient)
    step(scaled, gradient * 1024)
    assert torch.equal(plain.read(0, IDS), scaled.read(0, IDS))


def test_skip_if_skips_the_table_and_its_step() -> None:
    group = make_group(td.Adam(lr=0.1))
    group.rows.hyper.data[0, Hyper.SKIP_IF] = 1
    before = group.read(0, IDS)
    for table in (0, 1):
        step(group, torch.ones(len(IDS), DIM), table)
    assert torch.equal(group.read(0, IDS), before)
    assert group.rows.row_clock[:2].tolist() == [0, 1]


def test_clipping_can_change_without_a_new_optimizer() -> None:
    module = td.DynamicEmbedding(
        4, optimizer=td.SGD(lr=1.0, clip_value=0.5), initializer=td.Constant(0.0)
    )
    group = module.optimizer.param_groups[0]
    assert (group["clip_value"], group["clip_norm"]) == (0.5, None)
    seen = []
    for entries in ({}, {"clip_value": None}, {"clip_norm": 1.0}, {"clip_norm": None}):
        group.update(entries)
        before = module.group.read(0, IDS)
        (module(IDS) * 3).sum().backward()
        seen.append(round(float((before - module.group.read(0, IDS))[0, 0]), 6))
    assert seen == [0.5, 3.0, 0.5, 3.0]
    with pytest.raises(ValueError, match="param group: lr is None, expected a number"):
        group["lr"] = None
    assert group["lr"] == 1.0
    saved = module.optimizer.state_dict()
    assert saved["param_groups"][0]["clip_value"] is None
    module.optimizer.load_state_dict(saved)


# -- hyper-parameters ------------------------------------------------------------------------------


def test_learning_rate_as_a_tensor() -> None:
    config = td.Adam(lr=torch.tensor(0.25))
    assert config.lr == 0.25
    module = td.DynamicEmbedding(4, optimizer=config)
    group = module.optimizer.param_groups[0]
    rate, betas = torch.tensor(0.5), [torch.tensor(0.5), 0.75]
    group.update(lr=rate, betas=betas)
    assert module.group.rows.hyper[0, Hyper.LR] == 0.5
    rate.fill_(2.0)  # a tensor gives its value when it is assigned
    betas[0].fill_(2.0)
    assert (group["lr"], group["betas"]) == (0.5, (0.5, 0.75))


@pytest.mark.parametrize("key", ["lr", "betas", "eps", "weight_decay"])
def test_values_that_a_program_keeps_stay_as_they_were(key: str) -> None:
    """As those of torch.optim, of which a warm-up keeps the base rates."""
    tables, static = td.DynamicEmbedding(4, optimizer=td.Adam(lr=0.1)), nn.Linear(1, 1)
    seen = []
    for optimizer in (tables.optimizer, torch.optim.Adam(static.parameters(), lr=0.1)):
        group = optimizer.param_groups[0]
        kept, other = group[key], (0.5, 0.5) if key == "betas" else 0.5
        group[key] = other
        between = kept, group[key]
        group[key] = kept
        seen.append((between, group[key]))
    assert seen[0] == seen[1]


def test_maximize_is_training_with_negated_gradients() -> None:
    up, down = (
        make_group(td.Adam(lr=0.1, clip_value=0.5)),
        make_group(td.Adam(lr=0.1, clip_value=0.5)),
    )
    optimizer = td.FusedOptimizer(up.names, td.Adam(lr=0.1), rows=up.rows, end_step=up.step)
    for group in (up, down):
        group.rows.hyper[:, Hyper.DOWN_SCALE_BY] = 4.0
    for number, maximize in enumerate((False, True, False)):
        optimizer.param_groups[0]["maximize"] = maximize
        gradient = torch.randn(len(IDS), DIM, generator=seeded(number))
        step(up, gradient)
        step(down, -gradient if maximize else gradient)
        assert torch.equal(up.read(0, IDS), down.read(0, IDS))


# -- optimizers that come or change late -----------------------------------------------------------


def test_an_optimizer_for_rows_that_are_there() -> None:
    weight = torch.randn(6, 4, generator=seeded(1))
    module = td.DynamicEmbedding.from_embedding(weight, name="t", trainable=False)
    with pytest.raises(RuntimeError, match="trainable=False and no optimizer"):
        _ = module.optimizer
    assert not module(IDS).requires_grad
    optimizer = module.set_optimizer(td.Adagrad(lr=0.1, initial_accumulator_value=0.5))
    assert optimizer is module.optimizer
    twin = td.DynamicEmbedding.from_embedding(
        weight, name="t", optimizer=td.Adagrad(lr=0.1, initial_accumulator_value=0.5)
    )
    for _ in range(3):
        for each in (module, twin):
            each(torch.arange(8)).sum().backward()
            each.optimizer.step()
    assert torch.equal(module.group.read(0, IDS), twin.group.read(0, IDS))
    assert len(module) == 8


@pytest.mark.parametrize("split", [False, True])
def test_another_optimizer_starts_fresh(split: bool) -> None:
    module = td.DynamicEmbedding(4, name="t", optimizer=td.Adam(lr=0.1), split=split)
    for _ in range(3):
        module(IDS).sum().backward()
        module.optimizer.step()
    before, old = module.group.read(0, IDS), module.optimizer
    module.set_optimizer(td.RowWiseAdagrad(lr=0.5))
    assert isinstance(module.optimizer, td.SplitOptimizer) == split
    assert torch.equal(module.group.read(0, IDS), before)
    assert module.group.rows.row_clock[0] == 0
    module(IDS).sum().backward()
    module.optimizer.step()
    torch.testing.assert_close(module.group.read(0, IDS), before - 0.5)
    with pytest.raises(RuntimeError, match=r"another optimizer by set_optimizer"):
        old.step()
    module.load_state_dict(module.state_dict())


def test_policies_and_scores_survive_another_optimizer() -> None:
    torch.manual_seed(3)
    policy = td.Policy(score="frequency", capacity=4)
    module = td.DynamicEmbedding(4, name="t", optimizer=td.SGD(lr=0.1), policy=policy)
    for ids in ([1, 2, 3, 4], [1, 2, 3], [1, 2]):
        module(torch.tensor(ids)).sum().backward()
        module.optimizer.step()
    module.set_optimizer(td.Adam(lr=0.1))
    module(torch.tensor([9])).sum().backward()
    assert sorted(module.ids().tolist()) == [1, 2, 3, 9]


def test_what_is_no_config_is_refused() -> None:
    module = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
    module(IDS).sum().backward()
    before = module.group.read(0, IDS)
    with pytest.raises(TypeError, match="config is 'adam', expected a config such as"):
        module.set_optimizer("adam")  # type: ignore[arg-type]
    assert torch.equal(module.group.read(0, IDS), before)
    module.optimizer.step()
