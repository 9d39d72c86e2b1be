"""Checkpoints, logs and served copies of models inside wrappers: names are those of the models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import torch_dynemb as td
from torch_dynemb import checkpoint, delta_log

pytestmark = pytest.mark.cpu_only("names of modules, which know no device")


class Wrapped(nn.Module):
    """A model of which parts are inside wrappers, or are not."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        items = td.DynamicEmbedding(4, name="items", optimizer=td.SGD(lr=0.1))
        self.module = wrap(nn.Sequential(wrap(items), wrap(nn.Linear(4, 1))))

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.module(ids)
        return result


def compiled(module: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment]
    return wrapped


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": compiled,
    "parallel": nn.DataParallel,
    "checkpointed": checkpoint_wrapper,
    "both": lambda module: nn.DataParallel(compiled(module)),
}


@pytest.mark.parametrize(
    ("wrapper", "outer"),
    [
        ("compile", True),
        ("parallel", False),
        ("checkpointed", True),
        pytest.param("both", False, marks=pytest.mark.long),
    ],
)
def test_wrappers_do_not_change_names(tmp_path: Path, wrapper: str, outer: bool) -> None:
    wrap = WRAPPERS[wrapper]
    ids = torch.arange(9)
    plain, wrapped = Wrapped(lambda module: module), Wrapped(wrap)
    other = Wrapped(lambda module: module)
    whole = wrap(wrapped) if outer else wrapped
    plain(ids).sum().backward()
    plain.module[0].optimizer.step()
    with torch.no_grad():
        plain.module[1].weight += 1
    checkpoint.save(tmp_path / "last", plain)
    checkpoint.load(tmp_path / "last", whole)
    checkpoint.save(tmp_path / "last", whole)
    report = checkpoint.load(tmp_path / "last", other)
    assert list(report.tables) == ["module.0"]
    for model in (whole, other):
        assert torch.equal(model.eval()(ids), plain.eval()(ids))
    log = delta_log.DeltaLog(tmp_path / "log")
    log.attach(whole)
    live = td.serving.live(whole, headroom=9)
    followers = [delta_log.follow(tmp_path / "log", model) for model in (live, other, plain)]
    whole.train()(ids + 5).sum().backward()
    wrapped_items = next(m for m in whole.modules() if isinstance(m, td.DynamicEmbedding))
    wrapped_items.optimizer.step()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter += 1
    log.publish()
    log.close()
    assert [follower.update() for follower in followers] == [1, 1, 1]
    expected = whole.eval()(ids)
    for model in (live, other.eval(), plain.eval()):
        assert torch.equal(model(ids), expected)
    assert list(td.serving.live_tables(live)) == ["module.0.frozen_tables"]


def test_a_wrapper_with_an_entry_of_its_own_keeps_names(tmp_path: Path) -> None:
    def wrapped(value: float) -> nn.DataParallel:
        model = nn.DataParallel(nn.ModuleDict({"top": nn.Linear(1, 1)}))
        model.top = nn.Linear(1, 1)
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, value + number)
        return model

    checkpoint.save(tmp_path / "last", wrapped(1.0))
    other = wrapped(7.0)
    checkpoint.load(tmp_path / "last", other)
    assert [parameter.item() for parameter in other.parameters()] == [1, 2, 3, 4]


def test_a_module_inside_and_outside_a_wrapper_is_copied_once() -> None:
    items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
    items(torch.arange(5))
    frozen = td.freeze(nn.ModuleDict({"plain": items, "wrapped": nn.DataParallel(items)}))
    assert frozen["plain"] is frozen["wrapped"]


def test_a_checkpoint_with_nothing_in_common_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1)), nn.Linear(4, 1))
    model(torch.arange(5))
    checkpoint.save(tmp_path / "last", nn.ModuleDict({"net": model}))
    other = nn.Sequential(td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1)), nn.Linear(4, 1))
    for strict in (False, True):
        with pytest.raises(ValueError, match=r"\['net.0'.*no name in common.*ModuleDict"):
            checkpoint.load(tmp_path / "last", other, strict=strict)
    checkpoint.load(tmp_path / "last", nn.ModuleDict({"net": other}))  # as the error says
    assert torch.equal(other.eval()(torch.arange(5)), model.eval()(torch.arange(5)))


# -- of ranks --------------------------------------------------------------------------------------


def shared_model(group: dist.ProcessGroup | None) -> nn.Sequential:
    torch.manual_seed(0)
    items = td.DynamicEmbedding(4, name="items", optimizer=td.SGD(lr=0.1), process_group=group)
    return nn.Sequential(items, nn.Linear(4, 4))


def save_wrapped(rank: int, path: str, wrapper: str) -> None:
    model = shared_model(dist.group.WORLD)
    whole: nn.Module = model
    if wrapper == "ddp":
        whole = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel  # which takes long

        model[1] = FullyShardedDataParallel(model[1], device_id=torch.device("cpu"))
    whole(torch.arange(20)).sum().backward()
    model[0].optimizer.step()
    checkpoint.save(path, whole)
    model[0].group.clear(0)
    checkpoint.load(path, whole)
    checkpoint.save(path, whole)


@pytest.mark.parametrize("wrapper", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_wrappers_of_ranks_do_not_change_names(
    wrapper: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(save_wrapped, str(tmp_path / "last"), wrapper)
    saved, trained = shared_model(None), shared_model(None)
    trained(torch.arange(20)).sum().backward()
    trained[0].optimizer.step()
    assert list(checkpoint.load(tmp_path / "last", saved).tables) == ["0"]
    assert torch.allclose(saved.eval()(torch.arange(20)), trained.eval()(torch.arange(20)))
