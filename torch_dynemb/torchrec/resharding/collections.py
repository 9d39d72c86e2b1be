"""Resharding of sharded collections: checks, new shards beside the old ones, and the exchange."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.types import ParameterSharding, ShardingType

from torch_dynemb.checkpoint.saving.handle import check_none_running
from torch_dynemb.checkpoint.saving.save import check_saveable
from torch_dynemb.distributed.together import Ranks, ranks_of
from torch_dynemb.parts.table_parts import table_name
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.process.torch_modes import plain_torch
from torch_dynemb.torchrec.planning.options import is_dynamic
from torch_dynemb.torchrec.planning.plans import ModulePlan
from torch_dynemb.torchrec.resharding.moves import CollectionMove, ReshardedTable, move_tables
from torch_dynemb.torchrec.resharding.plan_changes import (
    check_stays_in_memory,
    check_types,
    moved_tables,
    options_to_compare,
)
from torch_dynemb.torchrec.sharding.evicted_ids import RecordedIds
from torch_dynemb.torchrec.sharding.kernels import DynamicKernel
from torch_dynemb.torchrec.state.module_state import ModuleState


class MovableCollection(Protocol):
    """A sharded collection with dynamic tables; see ``collections/dynamic_part.py``."""

    configs_attribute: Any
    module_sharding_plan: Mapping[str, ParameterSharding]
    plan_of_tables: ModulePlan
    sharding_types: list[str]
    wraps_apart: bool
    _state: ModuleState
    forward: Any

    def kernels(self) -> Iterator[DynamicKernel]: ...

    def check_one_group(self, call: str) -> None: ...

    def beside(self, changed: Mapping[str, ParameterSharding]) -> set[str]: ...

    def rebuilt(self, changed: Mapping[str, ParameterSharding]) -> Any: ...

    def adopt(self, other: Any) -> None: ...


Changes = Mapping[str, tuple[Any, Any]]


class _Change(NamedTuple):
    """Tables of a collection that move.

    Attributes:
        path: of the collection in the model.
        collection: with the old shards.
        moved: new shardings by table.
        beside: tables that share a sharding with these; they move within their ranks.
    """

    path: str
    collection: MovableCollection
    moved: dict[str, ParameterSharding]
    beside: set[str]


def reshard_collections(
    changes: Changes, process_group: dist.ProcessGroup | None
) -> dict[str, ReshardedTable]:
    """Move tables of collections to other shards: all of them, or none. All ranks call it together.

    Args:
        changes: by path, a collection with dynamic tables, and new shardings of some tables.
        process_group: of the ranks that share the tables.

    Returns:
        Results by name of the table.

    Raises:
        Exception: of any rank, on all ranks. The old shards are in place then, unchanged.
    """
    ranks = ranks_of(process_group)
    with plain_torch():
        prepared = _prepared(changes, ranks)
        rebuilt: list[Any] = []
        try:
            for change in prepared:
                rebuilt.append(change.collection.rebuilt(change.moved))
            moves = [
                CollectionMove(
                    change.path,
                    change.collection._state,
                    new._state,
                    sorted(change.moved.keys() | change.beside),
                )
                for change, new in zip(prepared, rebuilt, strict=True)
            ]
            result = move_tables(moves, ranks) if moves else {}
            with defer_signals():
                for change, new in zip(prepared, rebuilt, strict=True):
                    change.collection.adopt(new)
            del moves
        finally:
            rebuilt.clear()
            gc.collect()  # modules and optimizers of unused shards refer to each other
        ranks.gather(None)  # no rank looks ids up before all have their new shards
    return {
        name: result[name]
        for change in prepared
        for name in (table_name(change.path, table) for table in change.moved)
    }


def _prepared(changes: Changes, ranks: Ranks) -> list[_Change]:
    """Check everything that can be checked before anything is made."""

    def check_given() -> None:
        check_none_running()
        for path, (collection, changed) in changes.items():
            collection.check_one_group("reshard")
            check_types(path, changed)

    ranks.run(check_given)
    ranks.agree(
        "reshard",
        **{f"plan of {path!r}": options_to_compare(of) for path, (_, of) in changes.items()},
    )

    def check() -> list[_Change]:
        result = []
        for path, (collection, changed) in changes.items():
            configs = getattr(collection, collection.configs_attribute)
            moved = moved_tables(
                collection.module_sharding_plan,
                changed,
                collection.plan_of_tables,
                {config.name: config.embedding_dim for config in configs},
                sharding_types=collection.sharding_types(),
                ranks=ranks.size,
                ranks_of_node=get_local_size(ranks.size),
            )
            if moved:
                change = _Change(path, collection, moved, collection.beside(moved))
                check_stays_in_memory(moved.keys() | change.beside, collection.plan_of_tables)
                _check_free(path, collection, moved.keys() | change.beside)
                result.append(change)
        return result

    return ranks.run(check)


def _check_free(path: str, collection: MovableCollection, moved: set[str]) -> None:
    """Raise RuntimeError if tables are in use by something that would not follow them.

    Args:
        path: of the collection.
        collection: with the tables.
        moved: names of tables that move.
    """
    forward = vars(collection).get("forward")  # of a pipeline, unless it has detached the module
    if forward is not None and getattr(forward, "__func__", None) is not type(collection).forward:
        raise RuntimeError(
            f"reshard: a pipeline runs {path!r}, and has sent ids of its next batches to the old "
            "shards: call detach() of the pipeline, and make a new one afterwards"
        )
    replicated = [
        name
        for name, of in collection.module_sharding_plan.items()
        if of.sharding_type == ShardingType.DATA_PARALLEL.value
    ]
    if replicated and not collection.wraps_apart:
        raise NotImplementedError(
            f"reshard: tables {replicated} are data_parallel, and this TorchRec would wrap them in "
            "DistributedDataParallel again: give them a collection of their own"
        )
    written = [
        config.name
        for config in getattr(collection, collection.configs_attribute)
        if getattr(config, "enable_embedding_update", False)
        and not is_dynamic(collection.module_sharding_plan[config.name])
    ]
    if written:
        raise NotImplementedError(
            f"reshard: {path!r} has static tables {written} with enable_embedding_update, the "
            "writes of which would go to the old shards: save, and load into a model with the new "
            "plan"
        )
    for kernel in collection.kernels():
        names = [shard.name for shard in kernel.tables.shards]
        if not moved & set(names):
            continue
        group = kernel.tables.group
        check_saveable("reshard", group)
        logs = [name for name in group.tables.host.readers if name != "checkpoint"]
        if logs:
            raise RuntimeError(
                f"reshard: a delta log records changes of tables {names}: close the log, and begin "
                "a new one afterwards, because its followers know the old shards"
            )
        callback = group.tables.evictions.callback
        if isinstance(callback, RecordedIds):
            if any(map(callback.holds, group.names)):
                raise RuntimeError(
                    f"reshard: evicted ids of tables {names} are recorded and were not taken: call "
                    "pop_evicted_keys of torch_dynemb.compat.dynamicemb first"
                )
        elif callback is not None or group.index.evicted.shape[0] > 1:
            raise RuntimeError(
                f"reshard: evicted ids of tables {names} are recorded for the program by "
                "group.evicted, which new shards would not do: use "
                "TableOptions(record_evicted=True)"
            )


def check_static_move(collection: Any, changed: Any) -> None:
    """Raise NotImplementedError if TorchRec cannot move the tables of a static collection."""
    parents = type(collection).__mro__[2:]  # after the class and what it shares with others
    if not any("update_shards" in vars(kind) for kind in parents):
        raise NotImplementedError(
            f"update_shards: tables {list(changed)} are static, and this TorchRec cannot move "
            f"tables of {collection.unsharded_module_type.__name__}: save, and load into a model "
            "with the new plan"
        )


__all__ = ["check_static_move", "reshard_collections"]
