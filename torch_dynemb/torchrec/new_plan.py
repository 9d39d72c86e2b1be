"""Moves of the tables of a running model to the shards of another plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingPlan

from torch_dynemb.argument_checks import described
from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.torchrec.collections.dynamic_part import DynamicPart
from torch_dynemb.torchrec.planning.options import is_dynamic
from torch_dynemb.torchrec.resharding.collections import reshard_collections
from torch_dynemb.torchrec.resharding.moves import ReshardedTable
from torch_dynemb.torchrec.resharding.plan_changes import check_types, described_sharding


def reshard(
    model: DistributedModelParallel,
    plan: ShardingPlan | Mapping[str, Mapping[str, ParameterSharding]],
) -> dict[str, ReshardedTable]:
    """Move the dynamic tables of a running model to the shards of another plan.

    All ranks call it together, between two steps. The result has the bits of
    :func:`torch_dynemb.checkpoint.save` with the old plan and ``load`` into a model with the new
    one: ids, rows, optimizer state, scores, counts of admission, clocks. Hyper-parameters of
    optimizers stay those of now. The model, its ``fused_optimizer``, and schedulers of it stay the
    same objects. Optimizers from :func:`torch_dynemb.table_optimizers` belong to the old shards:
    list them again.

    Rows travel between old and new owners in pieces of at most 64 MiB. New shards get their ids
    last, and old ones are freed afterwards: until then memory holds both.

    Args:
        model: with collections that have dynamic tables.
        plan: a plan of all modules; or new shardings by path of a collection and name of the table.
            Tables that are missing, or have the same shards, stay.

    Returns:
        Numbers of ids and bytes, by name of the tables that have moved.

    Raises:
        TypeError: an argument has another type.
        ValueError: the plan differs between ranks, names an unknown module, table, sharding type or
            rank, or would change a table's kernel or options; or there is too little room.
        NotImplementedError: a static table would move, or rows lie in a store.
        InUseError: a save runs in the background, or another thread trains.
        RuntimeError: gradients are pending, or a delta log or a pipeline uses the tables.
        NoRoomError: memory is short.

    In all cases all ranks raise, and the model is as before.

    Example::

        plan = planner.collective_plan(unsharded, [sharder], dist.group.WORLD)
        for name, table in reshard(model, plan).items():
            print(name, table.ids, table.bytes)
    """
    sharded = isinstance(model, DistributedModelParallel)
    process_group = model._env.process_group if sharded else None
    ranks = ranks_of(process_group)

    def prepare() -> dict[str, tuple[DynamicPart, Any]]:
        if not sharded:
            raise TypeError(
                f"reshard: model is {described(model)}, expected a DistributedModelParallel: "
                "other modules divide their ids over ranks by themselves; save, and load on other "
                "ranks"
            )
        given = plan.plan if isinstance(plan, ShardingPlan) else plan
        if not isinstance(given, Mapping):
            raise TypeError(
                f"reshard: plan is {described(plan)}, expected a ShardingPlan, or a dict of new "
                "shardings by module and table"
            )
        return _changes(model.module, given)

    changes = ranks.run(prepare)
    ranks.agree("reshard", modules=sorted(changes))
    result = reshard_collections(changes, process_group)
    for path, (collection, _) in changes.items():
        model._plan.plan[path] = collection.module_sharding_plan
    return result


def _changes(
    model: nn.Module, plan: Mapping[str, Mapping[str, ParameterSharding]]
) -> dict[str, tuple[DynamicPart, Any]]:
    """Return the collections with dynamic tables that a plan names, with their new shardings."""
    modules = dict(model.named_modules())
    result = {}
    for path, changed in plan.items():
        if path not in modules:
            raise ValueError(
                f"reshard: the plan has module {path!r}, expected paths of sharded modules of the "
                "model, as in its plan"
            )
        module = modules[path]
        check_types(path, changed)
        if isinstance(module, DynamicPart) and any(
            map(is_dynamic, module.module_sharding_plan.values())
        ):
            result[path] = module, changed
            continue
        current = getattr(module, "module_sharding_plan", {})
        if any(
            name not in current or described_sharding(of) != described_sharding(current[name])
            for name, of in changed.items()
        ):
            raise NotImplementedError(
                f"reshard: module {path!r} has no dynamic tables: leave it out of the plan, or "
                "move its tables by DistributedModelParallel.reshard"
            )
    return result


__all__ = ["reshard"]
