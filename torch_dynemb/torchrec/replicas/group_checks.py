"""Checks of the arguments of DynamicDMPCollection, on all ranks, before anything is constructed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingPlan

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.distributed.agreement import Described, Option, check_agreement, comparable
from torch_dynemb.distributed.together import ranks_of

_OWNER = "DynamicDMPCollection"
_COMPARED = ("sharding_strategy", "node_group_size", "use_inter_host_allreduce")


def check_groups(
    module: object,
    device: object,
    plan: object,
    world_size: object,
    sharding_group_size: object,
    global_pg: object,
    more: Mapping[str, Any],
) -> None:
    """Check arguments; if one rank has a wrong one, or they differ, all ranks raise.

    Args:
        module, device, plan, world_size, sharding_group_size, global_pg: of the constructor.
        more: its other arguments.

    Raises:
        TypeError: an argument has another type.
        ValueError: groups would be unequal, the plan is not for one group, or ranks were given
            different arguments.
        NotImplementedError: ``submodule_configs`` over gloo.
    """
    if not isinstance(global_pg, dist.ProcessGroup):
        raise TypeError(
            f"{_OWNER}: global_pg is {described(global_pg)}, expected a ProcessGroup of all ranks "
            "such as torch.distributed.group.WORLD"
        )
    of_one_rank = (module, device, plan, world_size, sharding_group_size, global_pg, more)
    ranks_of(global_pg).run(lambda: _check_one_rank(*of_one_rank))
    assert isinstance(plan, ShardingPlan)
    alike: Described = {
        Option("", "sharding_group_size"): comparable(sharding_group_size),
        **{Option("", name): comparable(more.get(name)) for name in _COMPARED},
        Option("", "submodule_configs"): comparable(bool(more.get("submodule_configs"))),
    }
    for path, of_module in plan.plan.items():
        for table, sharding in dict(of_module).items():
            alike[Option(f"{path}.{table}", "plan")] = comparable(sharding)
    check_agreement(_OWNER, alike, global_pg)


def _check_one_rank(
    module: object,
    device: object,
    plan: object,
    world_size: object,
    sharding_group_size: object,
    global_pg: dist.ProcessGroup,
    more: Mapping[str, Any],
) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{_OWNER}: module is {described(module)}, expected a torch.nn.Module")
    if not isinstance(device, torch.device):
        raise TypeError(f"{_OWNER}: device is {described(device)}, expected a torch.device")
    if not isinstance(plan, ShardingPlan):
        raise TypeError(
            f"{_OWNER}: plan is {described(plan)}, expected a ShardingPlan for the ranks of one "
            "sharding group"
        )
    ranks = integer(f"{_OWNER}: world_size", world_size, least=1)
    if ranks != global_pg.size():
        raise ValueError(
            f"{_OWNER}: world_size is {ranks}, but global_pg has {global_pg.size()} ranks: give "
            "the number of all ranks"
        )
    size = integer(f"{_OWNER}: sharding_group_size", sharding_group_size, least=1)
    if ranks % size != 0:
        raise ValueError(
            f"{_OWNER}: sharding_group_size is {size}, which does not divide the world_size of "
            f"{ranks}: sharding groups, and replica groups, must have one size: choose a divisor"
        )
    for path, of_module in plan.plan.items():
        for table, sharding in dict(of_module).items():
            outside = [rank for rank in sharding.ranks or [] if not 0 <= rank < size]
            if outside:
                raise ValueError(
                    f"{_OWNER}: plan has table {table!r} of {path!r} on ranks {outside}, expected "
                    f"ranks below sharding_group_size {size}: make it for the ranks of one group"
                )
    if more.get("submodule_configs") and dist.get_backend(global_pg) == "gloo":
        raise NotImplementedError(
            f"{_OWNER}: submodule_configs is given, but over gloo all modules have the groups of "
            "sharding_group_size: leave submodule_configs out, or use nccl"
        )


__all__ = ["check_groups"]
