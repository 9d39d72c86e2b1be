"""td.checkpoint.save_with: hooks of accelerate; tests/programs runs accelerate itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("checkpoints, whatever the device")


class Accelerator:
    """The part of accelerate's that the hooks meet: it calls them as ``save_state`` does."""

    def __init__(self, distributed_type: str, *models: nn.Module) -> None:
        self.distributed_type = distributed_type
        self.models = [nn.DataParallel(model) for model in models]

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> None:
        self.save = hook

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> None:
        self.load = hook

    def unwrap_model(self, model: nn.DataParallel) -> nn.Module:
        return model.module


def models() -> list[nn.Module]:
    table = td.DynamicEmbedding(2, optimizer=td.SGD(lr=0.1))
    return [nn.Sequential(table, nn.Linear(2, 1)), nn.Linear(2, 2)]


def test_models_are_left_to_checkpoints(tmp_path: Path) -> None:
    source = Accelerator("MULTI_CPU", *models())
    source.models[0].module(torch.arange(7)).sum().backward()
    td.checkpoint.save_with(source)
    weights = [model.state_dict() for model in source.models]
    source.save(source.models, weights, str(tmp_path))
    assert weights == []
    target = Accelerator("NO", *models())
    td.checkpoint.save_with(target)
    left = list(target.models)
    target.load(left, str(tmp_path))
    assert left == []
    for one, other in zip(source.models, target.models, strict=True):
        states = one.state_dict(), other.state_dict()
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_what_is_refused(tmp_path: Path) -> None:
    wrong: Any = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"accelerator is .*Linear.*expected an accelerate\.Acc"):
        td.checkpoint.save_with(wrong)
    with pytest.raises(ValueError, match=r"distributed_type FSDP, expected.* call checkpoint\.sa"):
        td.checkpoint.save_with(Accelerator("FSDP"))
    accelerator = Accelerator("NO", *models())
    td.checkpoint.save_with(accelerator)
    with pytest.raises(FileNotFoundError, match="torch_dynemb_0"):  # saved without the hooks
        accelerator.load(list(accelerator.models), str(tmp_path))
