"""The order of decoupled weight decay and update, by the documented formulas in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torch_dynemb as td

pytestmark = pytest.mark.any_device

LR, DECAY, DIM, STEPS = 0.1, 0.5, 8, 4
Update = Callable[[Tensor, Tensor, list[Tensor]], Tensor]


def shrunk(z: Tensor, l1: float) -> Tensor:
    return torch.where(z.abs() <= l1, torch.zeros_like(z), z.sign() * l1 - z)


def ftrl(group_l1: float) -> Update:
    def update(w: Tensor, g: Tensor, state: list[Tensor]) -> Tensor:
        total = state[0] + g * g
        state[1] = state[1] + g - (total.sqrt() - state[0].sqrt()) / LR * w
        state[0] = total
        left = shrunk(state[1], 0.01)
        least = group_l1 * DIM**0.5
        share = (1 - least / left.norm(dim=1, keepdim=True)).clamp(min=0)
        return (1 - LR * DECAY) * share * left / ((1.0 + total.sqrt()) / LR + 0.2)

    return update


def lars(w: Tensor, g: Tensor, state: list[Tensor]) -> Tensor:
    rate = LR * 0.3 * w.norm(dim=1, keepdim=True) / g.norm(dim=1, keepdim=True)
    state[0] = 0.9 * state[0] + rate * g
    return (1 - LR * DECAY) * w - state[0]


DECOUPLED = {"lr": LR, "weight_decay": DECAY, "decoupled_weight_decay": True}
CASES: list[tuple[td.OptimizerConfig, Update, list[float]]] = [
    (
        td.Ftrl(l1=0.01, l2=0.2, beta=1.0, initial_accumulator_value=0.1, **DECOUPLED),
        ftrl(0.0),
        [0.1, 0.0],
    ),
    (
        td.GroupFtrl(
            l1=0.01, l2=0.2, beta=1.0, initial_accumulator_value=0.1, group_l1=0.05, **DECOUPLED
        ),
        ftrl(0.05),
        [0.1, 0.0],
    ),
    (td.LARSSGD(momentum=0.9, trust_coefficient=0.3, **DECOUPLED), lars, [0.0]),
]


@pytest.mark.parametrize(
    ("config", "update", "starts"), CASES, ids=["Ftrl", "GroupFtrl", "LARSSGD"]
)
def test_the_order_of_decay_and_update(
    config: td.OptimizerConfig, update: Update, starts: list[float]
) -> None:
    module = td.DynamicEmbedding(DIM, name="x", optimizer=config, initializer=td.Uniform(-1.0, 1.0))
    ids, other = torch.arange(6), torch.arange(10, 13)
    module(other).sum().backward()
    module.optimizer.step()
    untouched = module.group.read(0, other)
    generator = torch.Generator(device="cpu").manual_seed(3)
    w = module.group.read(0, ids).double()
    state = [torch.full_like(w, start) for start in starts]
    for _ in range(STEPS):
        g = torch.randn(6, DIM, generator=generator, device="cpu").to(w.device)
        module(ids).backward(g)
        module.optimizer.step()
        w = update(w, g.double(), state)
        torch.testing.assert_close(module.group.read(0, ids).double(), w, rtol=1e-4, atol=1e-5)
    assert torch.equal(module.group.read(0, other), untouched)
