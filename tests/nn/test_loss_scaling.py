"""GradScaler beside tables: refused before rows move, unless gradients wait for the step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.checkpoint import checkpoint

import torch_dynemb as td

pytestmark = pytest.mark.any_device

IDS = torch.arange(4)
REFUSED = r"GradScaler: the backward of a scaled loss would update the rows of .*split=True"


def table(**arguments: Any) -> td.DynamicEmbedding:
    start = td.Constant(0.5)
    return td.DynamicEmbedding(
        2, name="ads", optimizer=td.SGD(lr=0.1), initializer=start, **arguments
    )


def scaler(**arguments: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(torch.get_default_device().type, **arguments)


def rows(module: td.DynamicEmbedding) -> Tensor:
    return module.group.read(0, IDS)


def refused(module: td.DynamicEmbedding, scaled: Any) -> None:
    losses = [scaled] if isinstance(scaled, Tensor) else list(scaled)
    with pytest.raises(RuntimeError, match=REFUSED) as raised:
        torch.autograd.backward(losses)
    assert "(ads)" in str(raised.value)
    assert bool((rows(module) == 0.5).all())


class Scaler(torch.amp.GradScaler):
    """One that scales in its own way."""

    def scale(self, outputs: Any) -> Any:
        return outputs * 1024.0


LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda loss: scaler().scale(loss),
    "list": lambda loss: scaler().scale([loss, 2 * loss]),
    "nested": lambda loss: scaler().scale([(loss,)])[0],
    "iterator": lambda loss: scaler().scale(iter([loss])),
    "accumulated": lambda loss: scaler().scale(loss) / 4,
    "subclass": lambda loss: Scaler(loss.device.type).scale(loss),
    "scale of 1": lambda loss: scaler(init_scale=1.0).scale(loss),
}


@pytest.mark.parametrize("scale", LOSSES.values(), ids=LOSSES.keys())
def test_scaled_losses(scale: Callable[[Tensor], Any]) -> None:
    module = table()
    refused(module, scale(module(IDS).sum()))
    module(IDS).sum().backward()  # one that no scaler has seen
    torch.testing.assert_close(rows(module), torch.full((4, 2), 0.4))


def test_scalers_of_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torch.distributed.fsdp.sharded_grad_scaler._is_supported_device", lambda tensor: True
    )
    module = table()
    own = ShardedGradScaler.__new__(ShardedGradScaler)  # the constructor wants a process group
    torch.amp.GradScaler.__init__(own, torch.get_default_device().type)
    refused(module, own.scale(module(IDS).sum()))


def test_only_rows_that_the_loss_reaches_count() -> None:
    dense, module, split = nn.Linear(2, 1), table(), table(split=True)
    module(IDS).sum()
    used = scaler()
    used.scale(dense(split(IDS)).sum()).backward()
    assert dense.weight.grad is not None
    used.step(split.optimizer)
    used.update()
    assert bool((rows(split) != 0.5).any())
    with torch.no_grad():
        fixed = module(IDS)
    used.scale(dense(fixed).sum()).backward()
    used.scale(dense(module.eval()(IDS)).sum()).backward()
    module.train().grad_anchor.requires_grad_(False)
    used.scale(dense(module(IDS)).sum()).backward()
    assert bool((rows(module) == 0.5).all())


def test_what_scale_returns_is_as_before() -> None:
    module, plain = table(split=True), torch.ones(2)
    scaled = scaler(init_scale=8.0).scale((module(IDS).sum(), plain))
    assert isinstance(scaled, tuple)
    assert scaled[0].item() == 8 * 4.0
    assert torch.equal(scaled[1], 8 * plain)
    disabled = scaler(enabled=False)
    loss = table()(IDS).sum()
    assert disabled.scale(loss) is loss
    loss.backward()
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable"):
        scaler().scale(3)  # type: ignore[call-overload]


def test_copies_of_modules() -> None:
    module = copy.deepcopy(table())
    refused(module, scaler().scale(module(IDS).sum()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_lookups(reentrant: bool) -> None:
    """Of the reentrant kind the training lookup comes in the backward."""
    module, dense = table(), nn.Linear(2, 1)
    module(IDS)
    start = torch.zeros(1, requires_grad=True)
    loss = checkpoint(lambda x: module(IDS) + x, start, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match=r"GradScaler.*split=True"):
        scaler().scale(dense(loss).sum()).backward()
    assert bool((rows(module) == 0.5).all())
    checkpoint(module, IDS, use_reentrant=False).sum().backward()
    torch.testing.assert_close(rows(module), torch.full((4, 2), 0.4))


@pytest.mark.traced
def test_compiled_lookups() -> None:
    module = table(max_rows=100)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    refused(module, scaler().scale(compiled(IDS).sum()))
