"""Construction of a sharded collection again, for the shards of another plan."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torchrec.optim.fused import FusedOptimizerModule

from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.torchrec.planning.choice import TableChoice
from torch_dynemb.torchrec.planning.chosen_tables import configs_of

# of apply_optimizer_in_backward; TorchRec's constructors read them
_OF_PARAMETERS = ("_optimizer_classes", "_optimizer_kwargs")
# attributes of a module that belong to its user, or to hooks bound to it
_OF_THE_OBJECT = (vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}) | {
    "_free_features_storage_early",
    "_optim",
    "post_lookup_tracker_fn",
    "post_odist_tracker_fn",
}


class Given(NamedTuple):
    """Arguments that a collection was constructed with.

    Attributes:
        module: the unsharded collection, without weights.
        fused_params, choice, optimizer, use_index_dedup: see the collections.
        more: further arguments of TorchRec.
    """

    module: nn.Module
    fused_params: dict[str, Any] | None
    choice: TableChoice
    optimizer: OptimizerConfig | None
    use_index_dedup: bool
    more: Mapping[str, Any]


def blueprint(module: Any) -> nn.Module:
    """Copy an unsharded collection to the meta device, with the settings of its parameters."""
    memo: dict[int, Any] = {id(config): config for config in configs_of(module)}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        twin = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name in _OF_PARAMETERS:
            if hasattr(parameter, name):
                setattr(twin, name, getattr(parameter, name))
        memo[id(parameter)] = twin
    copied: Any = copy.deepcopy(module, memo)
    copied._device = torch.device("meta")
    result: nn.Module = copied
    return result


@contextmanager
def optimizers_unchanged(lookups: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the names of parameters in optimizers of lookups, which constructors prefix."""
    optimizers = [
        module.fused_optimizer
        for lookup in lookups
        for module in lookup.modules()
        if isinstance(module, FusedOptimizerModule)
    ]
    before = [optimizer.params for optimizer in optimizers]
    try:
        yield
    finally:
        for optimizer, params in zip(optimizers, before, strict=True):
            optimizer.params = params


def adopt(module: nn.Module, other: nn.Module) -> None:
    """Give a module the content of another one of its class; its hooks stay.

    Args:
        module: keeps its identity, hooks and mode.
        other: not to be used any more.
    """
    for name, value in vars(other).items():
        if name in ("_parameters", "_buffers", "_modules"):
            getattr(module, name).update(value)
        elif name not in _OF_THE_OBJECT:
            module.__dict__[name] = value


__all__ = ["Given", "adopt", "blueprint", "optimizers_unchanged"]
