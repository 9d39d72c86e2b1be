"""Optimizers: rows are trained as torch's optimizers train parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from small_embeddings import content, embedding, store
from torch import nn

import torch_dynemb as td
from torch_dynemb import oneembedding

pytestmark = pytest.mark.any_device

IDS = torch.tensor([[0], [1], [2]])
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.8),
    "dampened": partial(torch.optim.SGD, lr=0.1, momentum=0.8, dampening=0.4, maximize=True),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1, betas=(0.8, 0.9), weight_decay=0.1),
    "amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.2),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3, eps=1e-3),
    "adagrad lr decay": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.5),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.5, weight_decay=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=2.0, rho=0.5, eps=1e-3),
    "ftrl": partial(oneembedding.Ftrl, lr=0.1, lambda1=0.3, lambda2=0.1, beta=0.5),
    "smart decay": partial(oneembedding.SmartDecayAdam, lr=0.1, eps=1e-3),
}


class Pair(nn.Module):
    """An embedding, and a parameter with the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = embedding(1, size_factor=4)
        self.dense = nn.Parameter(self.embedding(IDS).detach().view(3, 4).clone())

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(IDS).view(3, 4)
        return (rows.sin() * weights).sum() + (self.dense.sin() * weights).sum()


def weights(steps: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(7)
    return torch.randn(steps, 3, 4, generator=generator, device="cpu").to(IDS.device)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_do_what_parameters_do(name: str) -> None:
    pair = Pair()
    dense = OPTIMIZERS[name](pair.parameters())
    optimizer = oneembedding.Optimizer(dense, [pair.embedding])
    schedule = torch.optim.lr_scheduler.ExponentialLR(dense, 0.7)
    before = pair.dense.detach().clone()
    for step, of_step in enumerate(weights(6)):
        pair(of_step).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        rows = pair.embedding(IDS).view(3, 4)
        torch.testing.assert_close(rows, pair.dense, rtol=1e-5, atol=1e-6, msg=f"step {step}")
    assert (before - pair.dense).abs().max() > 0.05


def test_schedulers_of_the_whole_optimizer_do_the_same() -> None:
    pair = Pair()
    optimizer = oneembedding.Optimizer(OPTIMIZERS["adam"](pair.parameters()), [pair.embedding])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for of_step in weights(3):
        pair(of_step).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.0125, 0.0125]
    torch.testing.assert_close(pair.embedding(IDS).view(3, 4), pair.dense, rtol=1e-5, atol=1e-6)


def test_rows_of_smart_decay_adam_catch_up() -> None:
    smart, plain = embedding(1, store_options=store(storage_dim=13)), embedding(1)
    for module, kind in [(smart, oneembedding.SmartDecayAdam), (plain, torch.optim.Adam)]:
        optimizer = oneembedding.Optimizer(kind(module.parameters(), lr=0.1), [module])
        for ids in ([0, 1], [1], [1], [0, 1]):
            module(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
    ours, adams = content(smart), content(plain)
    torch.testing.assert_close(ours[0, 1], adams[0, 1])
    assert (ours[0, 0] - adams[0, 0]).abs().min() > 1e-3


def test_several_lookups_are_one_step() -> None:
    once, twice = embedding(1), embedding(1)
    for module, pieces in ((once, [[3, 4]]), (twice, [[3], [4]])):
        adam = torch.optim.Adam(module.parameters(), lr=0.1)
        optimizer = oneembedding.Optimizer(adam, [module])
        for _ in range(2):
            for ids in pieces:
                module(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
    assert all(torch.equal(row, content(twice)[key]) for key, row in content(once).items())


def test_zero_grad_forgets_the_gradients_of_rows() -> None:
    pair = Pair()
    optimizer = oneembedding.Optimizer(OPTIMIZERS["sgd"](pair.parameters()), [pair.embedding])
    before = content(pair.embedding)
    pair(weights(1)[0]).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert pair.dense.grad is None
    assert all(torch.equal(row, before[key]) for key, row in content(pair.embedding).items())


def test_a_closure_is_called_once() -> None:
    pair = Pair()
    optimizer = oneembedding.Optimizer(OPTIMIZERS["sgd"](pair.parameters()), [pair.embedding])
    calls = []

    def closure() -> float:
        loss = pair(weights(1)[0])
        loss.backward()
        calls.append(loss.item())
        return calls[-1]

    assert optimizer.step(closure) == calls[0]
    assert len(calls) == 1
    torch.testing.assert_close(pair.embedding(IDS).view(3, 4), pair.dense)
    with pytest.raises(TypeError, match="closure is 3"):
        optimizer.step(3)


def test_a_grad_scaler_scales_gradients_of_both() -> None:
    pair = Pair()
    optimizer = oneembedding.Optimizer(OPTIMIZERS["sgd"](pair.parameters()), [pair.embedding])
    scaler = torch.amp.GradScaler(IDS.device.type, init_scale=8.0)
    before = content(pair.embedding)
    for of_step in (weights(1)[0], weights(1)[0] * float("inf")):
        scaler.scale(pair(of_step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = content(pair.embedding)
        torch.testing.assert_close(pair.embedding(IDS).view(3, 4), pair.dense)
        assert all(row.isfinite().all() for row in after.values())
    assert not torch.equal(after[0, 0], before[0, 0])
    assert scaler.get_scale() == 4.0


def test_state_of_the_optimizer_continues() -> None:
    first, second = Pair(), Pair()
    made = [
        oneembedding.Optimizer(OPTIMIZERS["adam"](pair.parameters()), [pair.embedding])
        for pair in (first, second)
    ]
    first(weights(1)[0]).backward()
    made[0].step()
    made[0].param_groups[0]["lr"] = 0.03
    second.load_state_dict(first.state_dict())
    made[1].load_state_dict(copy.deepcopy(made[0].state_dict()))  # torch's shares tensors
    for pair, optimizer in ((first, made[0]), (second, made[1])):
        optimizer.zero_grad()
        pair(weights(2)[1]).backward()
        optimizer.step()
    assert torch.equal(first.dense, second.dense)
    assert torch.equal(first.embedding(IDS), second.embedding(IDS))
    with pytest.raises(TypeError, match="create it again"):
        made[0].__getstate__()


def test_training_without_an_optimizer_is_refused() -> None:
    module = embedding(1)
    module(torch.tensor([1])).sum().backward()
    if module.group.device.type == "cpu":
        with pytest.raises(RuntimeError, match=r"no optimizer will apply them: wrap the optimizer"):
            module(torch.tensor([1]))
    with pytest.raises(RuntimeError, match=r"'small' has no optimizer yet: wrap"):
        module.optimizer.step()
    before = content(module)[0, 1]
    module.set_optimizer(td.SGD(lr=1.0)).step()
    torch.testing.assert_close(content(module)[0, 1], before - 1)


def test_options_that_keep_other_state_are_refused_at_the_step() -> None:
    pair = Pair()
    sgd = torch.optim.SGD(pair.parameters(), lr=0.1)
    optimizer = oneembedding.Optimizer(sgd, [pair.embedding])
    sgd.param_groups[0]["momentum"] = 0.5
    pair(weights(1)[0]).backward()
    with pytest.raises(ValueError, match="needs other row state: create a new Optimizer"):
        optimizer.step()
