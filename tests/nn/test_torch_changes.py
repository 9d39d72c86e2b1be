"""The functions of torch that are replaced: those of the list, and none after restore_torch()."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

import torch_dynemb as td
from torch_dynemb.nn import distributed_checkpoint, torch_changes
from torch_dynemb.nn.averaged_models import average_tables_too

pytestmark = pytest.mark.cpu_only("functions of torch, whatever the device")


PACKAGE = f"{os.sep}torch_dynemb{os.sep}"
OTHERS = {*sys.stdlib_module_names, "torch", "torchrec", "fbgemm_gpu", "tensordict", "numpy"}
OTHERS |= {"safetensors", "fsspec", "redis", "pyarrow"}


def replaced() -> dict[str, set[str]]:
    """Find functions in others' modules and classes with code of this package, by owner."""
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] in OTHERS]
    owners = {id(of): of for of in modules if isinstance(of, ModuleType)}
    for module in list(owners.values()):
        owners |= {
            id(of): of
            for of in list(vars(module).values())
            if issubclass(type(of), type) and of.__module__.split(".")[0] in OTHERS
        }
    found: dict[str, set[str]] = {}
    for owner in owners.values():
        for name, value in list(vars(owner).items()):
            function = value.__func__ if type(value) in (classmethod, staticmethod) else value
            if type(function) is FunctionType and PACKAGE in function.__code__.co_filename:
                found.setdefault(owner.__name__.rpartition(".")[2], set()).add(name)
    found.pop("ShardedGradScaler", None)  # a subclass, where FSDP has been imported
    return found


def make_changes() -> None:
    average_tables_too()
    td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1)).state_dict()


@pytest.fixture
def changes() -> Iterator[None]:
    make_changes()
    yield
    torch_changes._restored.clear()
    distributed_checkpoint.support_default_planner.cache_clear()
    make_changes()


def test_the_list_is_whole_and_can_be_switched_off(changes: None) -> None:
    before = replaced()
    assert before == {
        "AveragedModel": {"__init__", "update_parameters"},
        "DefaultLoadPlanner": {"set_up_planner"},
        "GradScaler": {"__init_subclass__", "_unscale_grads_", "scale", "unscale_"},
        "Module": {"_apply", "zero_grad"},
        "clip_grad": {"_clip_grads_with_norm_", "clip_grad_value_"},
        "utils": {"clip_grad_value_", "clip_grads_with_norm_"},
    }
    listed = {name.strip(",:;") for why in torch_changes.CHANGES.values() for name in why.split()}
    assert {name for owner in before if owner != "utils" for name in before[owner]} <= listed
    td.restore_torch("clip_grad")
    assert replaced().keys() == before.keys() - {"clip_grad", "utils"}
    distributed_checkpoint.support_default_planner.cache_clear()
    td.restore_torch()
    make_changes()
    assert replaced() == {}


def test_finders_of_modules_are_those_of_the_guide() -> None:
    package = Path(td.__file__).parent
    finders = re.compile(r"meta_path\.\w+\((?:0, )?(\w+)")
    found = {name for file in package.rglob("*.py") for name in finders.findall(file.read_text())}
    assert found == {"self", "_PlannerImport", "MissingModules"}


def test_unknown_changes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"restore_torch: changes has \['x'\], expected names of"):
        td.restore_torch("clip_grad", "x")
    of = nn.Sequential(td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1)))
    of(torch.arange(3)).sum().backward()
    with pytest.warns(RuntimeWarning, match="clips gradients"):
        nn.utils.clip_grad_norm_(of.parameters(), 1.0)


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.half(),
        lambda model: model.to(torch.float64),
        lambda model: model.to("meta"),
        lambda model: model.share_memory(),
    ],
    ids=["half", "double", "meta", "share_memory"],
)
def test_conversions_that_tables_refuse_leave_all_layers(convert: Any) -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.Sequential(nn.LSTM(4, 4), td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))),
    )
    before = [(p.dtype, p.device, p.data_ptr(), p.is_shared()) for p in model.parameters()]
    for _ in range(2):
        with pytest.raises((TypeError, RuntimeError), match="DynamicEmbedding"):
            convert(model)
    after = [(p.dtype, p.device, p.data_ptr(), p.is_shared()) for p in model.parameters()]
    assert after == before
    model[0].half()
    assert model[0].weight.dtype == torch.float16


class Kept(nn.Module):
    """A table that conversions of a model leave as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        return self


def test_conversions_leave_out_what_a_parent_keeps() -> None:
    model = nn.Sequential(Kept(), nn.Linear(4, 4)).half()
    assert model[1].weight.dtype == torch.float16
    with pytest.raises(TypeError, match="DynamicEmbedding"):
        model[0].table.half()
