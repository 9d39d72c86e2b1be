"""What looks at gradients that wait for optimizer.step(): norms, clipping, GradScaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from group_calls import (
    differences,
    snapshot,
)
from seeding import seeded
from split_modules import DIM, embedding, train
from torch import Tensor, nn

import torch_dynemb as td

pytestmark = pytest.mark.any_device


# -- norms ---------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).square().sum()


def model_pair(**arguments: Any) -> tuple[Model, Model, torch.optim.Optimizer]:
    """One with a dynamic table, one with a static one of the same values."""
    torch.manual_seed(1)
    dynamic = Model(embedding(td.SGD(lr=0.5), **arguments))
    rows = dynamic.table.group.read(0, torch.arange(20))
    torch.manual_seed(1)
    Model(nn.Identity())
    static = Model(nn.Embedding.from_pretrained(rows.clone(), freeze=False))
    static.head.load_state_dict(dynamic.head.state_dict())
    return dynamic, static, torch.optim.SGD(static.parameters(), lr=0.5)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_one_norm_over_dense_and_dynamic_parameters(norm_type: float) -> None:
    dynamic, static, reference = model_pair()
    dense = torch.optim.SGD(dynamic.head.parameters(), lr=0.5)
    for step in range(3):
        parts = torch.randint(20, (2, 12), generator=seeded(step))
        for ids in parts:
            dynamic(ids).backward()
            static(ids).backward()
        norm = td.clip_grad_norm_(dynamic, 0.25, norm_type)
        expected = nn.utils.clip_grad_norm_(static.parameters(), 0.25, norm_type)
        torch.testing.assert_close(norm, expected)
        for optimizer in (dense, dynamic.table.optimizer, reference):
            optimizer.step()
            optimizer.zero_grad()
    ids = torch.arange(20)
    torch.testing.assert_close(dynamic.table.group.read(0, ids), static.table.weight.detach())


def test_clip_grad_norm_takes_several_modules_once() -> None:
    dynamic, _, _ = model_pair()
    dynamic(torch.arange(5)).backward()
    once = td.clip_grad_norm_(dynamic, 1e9)
    assert torch.equal(td.clip_grad_norm_([dynamic, dynamic.table, dynamic.head], 1e9), once)
    assert td.clip_grad_norm_(nn.Linear(2, 2), 1.0) == 0


class Scaled(td.DynamicEmbedding):
    """A table with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(DIM, optimizer=td.SGD(lr=0.5), split=True)
        self.scale = nn.Parameter(torch.tensor(2.0))


def test_clip_grad_norm_clips_parameters_of_a_table_module_too() -> None:
    module = Scaled()
    module.scale.grad = torch.tensor(3.0)
    train(module, torch.tensor([1]), torch.full((1, DIM), 4.0 / DIM**0.5))
    torch.testing.assert_close(td.clip_grad_norm_(module, 1.0), torch.tensor(5.0))
    torch.testing.assert_close(module.scale.grad, torch.tensor(0.6))


def test_clip_grad_norm_refuses_fused_tables() -> None:
    dynamic, _, _ = model_pair(split=False)
    with pytest.raises(ValueError, match=r"DynamicEmbedding updates its rows in backward.*split"):
        td.clip_grad_norm_(dynamic, 1.0)


def test_clip_grad_norm_says_what_is_not_finite() -> None:
    dynamic, _, _ = model_pair()
    (dynamic(torch.arange(5)) * float("nan")).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        td.clip_grad_norm_(dynamic, 1.0, error_if_nonfinite=True)


def test_gradients_can_be_seen_and_changed_but_not_replaced() -> None:
    module = embedding(td.SGD(lr=1.0))
    (stand_in,) = module.optimizer.stand_ins()
    assert stand_in.grad is None
    assert not list(module.parameters())[1:]  # the anchor alone
    train(module, torch.tensor([1, 1, 2]), torch.ones(3, DIM))
    assert stand_in.grad is not None
    assert stand_in.grad[:, 0].tolist() == [2, 1]
    with pytest.raises(TypeError, match=r"change them in place, as .* or set them to None"):
        stand_in.grad = torch.zeros(2, DIM)
    before = module.group.read(0, torch.tensor([1, 2]))
    stand_in.grad.mul_(10)
    module.optimizer.step()
    moved = before - module.group.read(0, torch.tensor([1, 2]))
    torch.testing.assert_close(moved[:, 0], torch.tensor([20.0, 10.0]))
    train(module, torch.tensor([1]), torch.ones(1, DIM))
    stand_in.grad = None
    assert stand_in.grad is None


# -- torch.amp.GradScaler --------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale: bool) -> None:
    """Powers of two: scaling leaves no trace."""
    scaled, plain = embedding(td.Adam(lr=0.1)), embedding(td.Adam(lr=0.1))
    scaler = torch.amp.GradScaler(
        torch.get_default_device().type, init_scale=1024.0, growth_interval=2
    )
    ids = torch.arange(5)
    for step in range(4):
        gradient = torch.randn(5, DIM, generator=seeded(step))
        scaler.scale((scaled(ids) * gradient).sum()).backward()
        if unscale:
            scaler.unscale_(scaled.optimizer)
            td.clip_grad_norm_(scaled, 1e9)
        scaler.step(scaled.optimizer)
        scaler.update()
        (plain(ids) * gradient).sum().backward()
        plain.optimizer.step()
    assert scaler.get_scale() == 4096
    assert torch.equal(scaled.group.read(0, ids), plain.group.read(0, ids))
    assert scaled.group.rows.row_clock[0] == 4


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_grad_scaler_skips_a_step_that_overflowed(unscale: bool, bad: float) -> None:
    module = embedding(td.Adam(lr=0.1))
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0)
    ids = torch.arange(5)
    for step, factor in enumerate((1.0, bad, 1.0)):
        before = snapshot(module.group)
        scaler.scale((module(ids) * factor).sum()).backward()
        if unscale:
            scaler.unscale_(module.optimizer)
        scaler.step(module.optimizer)
        scaler.update()
        same = differences(before, snapshot(module.group))
        assert ("weights[0]" not in same) == (step == 1)
        assert module.group.rows.row_clock[0] == (1, 1, 2)[step]
    assert scaler.get_scale() == 512
    assert bool(torch.isfinite(module.group.read(0, ids)).all())


def test_grad_scaler_without_gradients() -> None:
    module, dense = embedding(td.SGD(lr=0.1)), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(torch.get_default_device().type)
    scaler.scale(dense(torch.ones(1, 1)).sum()).backward()
    scaler.step(optimizer)
    scaler.step(module.optimizer)
    scaler.update()
    assert len(module) == 0
