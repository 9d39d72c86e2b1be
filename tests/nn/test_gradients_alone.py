"""Gradients that a program asks for without training, as GradNorm does, leave rows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_dynemb as td

pytestmark = pytest.mark.any_device

IDS = torch.tensor([[1, 2], [3, 1]])


class Gated(nn.Module):
    """Two bags with learned weights, of one table, below a dense layer."""

    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        self.bag, self.gate, self.head = bag, nn.Linear(1, 1), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        weights = self.gate(ids[..., None].float())[..., 0]
        rows = self.bag(ids, per_sample_weights=weights) + self.bag(ids.flip(1))
        loss: Tensor = self.head(rows).square().sum()
        return loss

    def dense(self) -> list[nn.Parameter]:
        return [*self.gate.parameters(), *self.head.parameters()]


def models(split: bool) -> tuple[Gated, Gated]:
    torch.manual_seed(0)
    static = Gated(nn.EmbeddingBag(6, 4, mode="sum"))
    bag = td.DynamicEmbeddingBag.from_embedding(
        static.bag, mode="sum", name="items", optimizer=td.SGD(lr=0.1), split=split
    )
    dynamic = Gated(bag)
    dynamic.gate.load_state_dict(static.gate.state_dict())
    dynamic.head.load_state_dict(static.head.state_dict())
    return dynamic, static


def rows_of(model: Gated) -> Tensor:
    group: td.TableGroup = model.bag.group  # type: ignore[assignment]
    return group.read(0, torch.arange(6))


def trained(model: Gated, loss: Tensor, optimizer: Any) -> list[Tensor]:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return [p.grad for p in model.dense() if p.grad is not None]


Ask = Callable[[Gated, Tensor], Any]
ASKED: dict[str, Ask] = {
    "of all parameters": lambda m, loss: torch.autograd.grad(
        loss, list(m.parameters()), retain_graph=True
    ),
    "allow_unused": lambda m, loss: torch.autograd.grad(
        loss, list(m.parameters()), retain_graph=True, allow_unused=True
    ),
    "of what is in front": lambda m, loss: torch.autograd.grad(
        loss, list(m.gate.parameters()), retain_graph=True
    ),
    "of what is behind, twice": lambda m, loss: torch.autograd.grad(
        loss, list(m.head.parameters()), create_graph=True
    ),
    "backward of some": lambda m, loss: loss.backward(retain_graph=True, inputs=m.dense()),
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED.keys())
def test_rows_stay_until_a_backward_trains_them(ask: Ask, split: bool) -> None:
    """The same graph may train afterwards, by one update for both lookups."""
    dynamic, static = models(split)
    before, losses = rows_of(dynamic), (dynamic(IDS), static(IDS))
    given, expected = ask(dynamic, losses[0]), ask(static, losses[1])
    if given is not None:
        named = [name for name, _ in dynamic.named_parameters()]
        dense = [g for name, g in zip(named, given, strict=False) if "grad_anchor" not in name]
        wanted = [g for g in expected if g.shape != (6, 4)]
        assert len(given) == len(expected)
        torch.testing.assert_close(dense if len(given) > 2 else list(given), wanted)
    assert dynamic.bag.optimizer.updates_since_step() == 0  # type: ignore[operator, union-attr]
    assert torch.equal(rows_of(dynamic), before)
    grads = [
        trained(dynamic, losses[0], dynamic.bag.optimizer),
        trained(static, losses[1], torch.optim.SGD(static.bag.parameters(), lr=0.1)),
    ]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(rows_of(dynamic), static.bag.weight.detach())  # type: ignore[operator, union-attr]


def test_a_backward_of_the_anchor_trains() -> None:
    dynamic, _ = models(False)
    before = rows_of(dynamic)
    dynamic(IDS).backward(inputs=list(dynamic.bag.parameters()))
    assert not torch.equal(rows_of(dynamic), before)
    assert dynamic.bag.grad_anchor.grad is None
    assert dynamic.gate.weight.grad is None


@pytest.mark.parametrize("split", [False, True])
def test_a_penalty_of_scaled_gradients(split: bool) -> None:
    """PyTorch's recipe of a gradient penalty with GradScaler, up to the backward."""
    torch.manual_seed(0)
    items = td.DynamicEmbedding(4, name="items", optimizer=td.SGD(lr=0.1), split=split)
    model = nn.Sequential(items, nn.Linear(4, 1))
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0)
    loss = model(IDS).square().sum()
    before = items.group.read(0, IDS.flatten())
    scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
    plain = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close([gradient / 8.0 for gradient in scaled], list(plain))
    items.optimizer.step()
    assert torch.equal(items.group.read(0, IDS.flatten()), before)


@pytest.mark.parametrize("split", [False, True])
def test_full_softmax(split: bool) -> None:
    items = td.DynamicEmbedding(4, name="items", optimizer=td.SGD(lr=0.1), split=split)
    items(IDS)
    before, query = items.group.read(0, IDS.flatten()), torch.ones(2, 4, requires_grad=True)
    loss = td.FullSoftmaxLoss(items)(query, torch.tensor([1, 2]))
    asked, of_anchor = torch.autograd.grad(loss, [query, items.grad_anchor], retain_graph=True)
    items.optimizer.step()
    assert torch.equal(items.group.read(0, IDS.flatten()), before)
    loss.backward()
    items.optimizer.step()
    assert not torch.equal(items.group.read(0, IDS.flatten()), before)
    assert torch.equal(asked, query.grad)  # type: ignore[arg-type]
    assert not of_anchor.any()
