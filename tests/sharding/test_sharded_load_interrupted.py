"""An error or Ctrl-C in a load of a sharded state dict leaves what there was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from failed_loads import WAYS, Load, check_failing_load
from state_steps import Setting, model_of, train
from torchrec.distributed.model_parallel import DistributedModelParallel

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


def of_state_dict(policy: str) -> Load:
    saved = model_of(Setting(policy=policy))
    train(saved, 0, range(3))
    state = saved.state_dict()

    def make() -> DistributedModelParallel:
        torch.manual_seed(0)
        model = model_of(Setting(policy=policy))
        for kernel in model.module.kernels():
            if kernel.tables.group.config.keeps_time:
                kernel.tables.group.clock.set_now(900)  # not this machine's clock
        train(model, 0, range(50, 51))
        return model

    def seen(model: DistributedModelParallel) -> Any:
        kernels = list(model.module.kernels())
        return [kernel.tables.group.state.tensors() for kernel in kernels]

    return Load(make, lambda model: model.load_state_dict(state), seen)


@pytest.mark.parametrize("way", WAYS)
def test_a_load_that_fails_changes_nothing(one_rank: None, way: str) -> None:
    check_failing_load(of_state_dict("admission"), way, points=5)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["admission", "scores"])
def test_a_load_that_fails_anywhere_changes_nothing(one_rank: None, policy: str, way: str) -> None:
    check_failing_load(of_state_dict(policy), way, points=100)
