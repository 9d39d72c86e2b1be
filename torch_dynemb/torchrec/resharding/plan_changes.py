"""Checks of a new plan for tables that live: what may change, and to what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torchrec.distributed.types import ParameterSharding, ShardingType

from torch_dynemb.argument_checks import described
from torch_dynemb.distributed.agreement import comparable
from torch_dynemb.torchrec.planning.options import is_dynamic, planned_options
from torch_dynemb.torchrec.planning.plans import ModulePlan
from torch_dynemb.torchrec.sharding.shardings import BY_ROWS
from torch_dynemb.torchrec.state.shard_places import places_of

_COMPARED = ("sharding_type", "compute_kernel", "ranks", "sharding_spec")


def check_types(path: str, changed: object) -> None:
    """Raise TypeError unless a module's plan maps names to shardings."""
    if not isinstance(changed, Mapping):
        raise TypeError(
            f"reshard: the plan of {path!r} is {described(changed)}, expected a dict of "
            "ParameterSharding by table"
        )
    for name, sharding in changed.items():
        if not isinstance(name, str) or not isinstance(sharding, ParameterSharding):
            raise TypeError(
                f"reshard: the plan of {path!r} has {described(name)}: {described(sharding)}, "
                "expected the name of a table and a ParameterSharding"
            )


def described_sharding(sharding: ParameterSharding) -> str:
    """Return a text that is equal for equal shards."""
    return comparable([getattr(sharding, name) for name in _COMPARED])


def moved_tables(
    current: Mapping[str, ParameterSharding],
    changed: Mapping[str, ParameterSharding],
    plan: ModulePlan,
    columns: Mapping[str, int],
    *,
    sharding_types: Sequence[str],
    ranks: int,
    ranks_of_node: int,
) -> dict[str, ParameterSharding]:
    """Return the new shardings of the tables that move; tables with the same shards stay.

    Args:
        current: shardings of all tables of a collection.
        changed: new shardings of some of them.
        plan: options of the dynamic tables.
        columns: of all tables.
        sharding_types: that dynamic tables of the collection may have.
        ranks: number of ranks.
        ranks_of_node: of these, on one node.

    Raises:
        ValueError: a table is unknown, would change its kernel or options, or its sharding is not
            one of these ranks.
        NotImplementedError: a static table would move, or rows lie in a store.
    """
    unknown = sorted(changed.keys() - current.keys())
    if unknown:
        raise ValueError(
            f"reshard: the plan has tables {unknown}, expected some of {list(current)}"
        )
    result = {}
    for name, sharding in changed.items():
        before = current[name]
        if is_dynamic(sharding) != is_dynamic(before):
            raise ValueError(
                f"reshard: table {name!r} has compute_kernel {before.compute_kernel!r}, but the "
                f"plan has {sharding.compute_kernel!r}: a live table stays static or dynamic"
            )
        if described_sharding(sharding) == described_sharding(before):
            continue
        if not is_dynamic(before):
            raise NotImplementedError(
                f"reshard: table {name!r} is static and beside dynamic tables; it cannot move: "
                "leave it where it is, or give static tables a collection of their own"
            )
        _check_options(name, sharding, plan)
        _check_shards(
            name, sharding, columns[name], sharding_types, ranks=ranks, ranks_of_node=ranks_of_node
        )
        _check_state(name, before, sharding, plan)
        result[name] = replace(sharding, key_value_params=before.key_value_params)
    return result


def _check_options(name: str, sharding: ParameterSharding, plan: ModulePlan) -> None:
    options, planned = plan.options[name], planned_options(sharding)
    if planned is not None and comparable(planned) != comparable(options):
        raise ValueError(
            f"reshard: the plan has other TableOptions for table {name!r} than it lives with: keep "
            "its options, or leave them out"
        )


def check_stays_in_memory(tables: Iterable[str], plan: ModulePlan) -> None:
    """Raise NotImplementedError if rows of tables lie in a store.

    Args:
        tables: that move, or share a sharding with tables that do.
        plan: with their options.
    """
    for name in sorted(tables):
        storage = plan.options[name].storage
        if storage is not None:
            raise NotImplementedError(
                f"reshard: table {name!r} has storage {type(storage).__name__}, and moves itself "
                "or has the sharding type of a table that does; rows in a store stay where they "
                "are: save with torch_dynemb.checkpoint.save, and load into a model with the new "
                "plan"
            )


def _check_shards(
    name: str,
    sharding: ParameterSharding,
    columns: int,
    sharding_types: Sequence[str],
    *,
    ranks: int,
    ranks_of_node: int,
) -> None:
    """Raise ValueError unless a sharding has all columns and ids on existing ranks."""
    kind, table = sharding.sharding_type, f"reshard: table {name!r}"
    if kind not in sharding_types:
        raise ValueError(
            f"{table} has sharding_type {kind!r}, expected one of {list(sharding_types)}"
        )
    if sharding.sharding_spec is None or not sharding.sharding_spec.shards:
        raise ValueError(
            f"{table} has no sharding_spec: make it by a planner, or by "
            "construct_module_sharding_plan of torchrec.distributed.sharding_plan"
        )
    places = places_of(sharding)
    outside = sorted({place.rank for place in places if not 0 <= place.rank < ranks})
    if outside:
        raise ValueError(f"{table} has shards on ranks {outside}, expected ranks 0 to {ranks - 1}")
    given = list(sharding.ranks or [])
    shown = [shard.placement.rank() for shard in sharding.sharding_spec.shards]
    if sorted(given) != sorted(shown):
        raise ValueError(f"{table} has ranks {given}, but its sharding_spec has {shown}")
    end = 0
    for place in places:
        if place.part == 0 and place.first_column != end:
            break
        end = place.first_column + place.columns
    if end != columns:
        raise ValueError(
            f"{table} has column shards that begin at "
            f"{sorted({place.first_column for place in places})} and end at {end}, expected all of "
            f"{columns} columns"
        )
    by_columns: dict[int, list[int]] = {}
    for place in places:
        by_columns.setdefault(place.column_shard, []).append(place.rank)
    for of_columns in by_columns.values():
        node = of_columns[0] // ranks_of_node * ranks_of_node
        expected = list(range(node, node + ranks_of_node))
        if kind == ShardingType.ROW_WISE.value:
            expected = list(range(ranks))
        if kind in BY_ROWS and of_columns != expected:
            raise ValueError(f"{table} is {kind} on ranks {of_columns}, expected {expected}")
    if kind == ShardingType.TABLE_WISE.value and len(shown) != 1:
        raise ValueError(f"{table} is table_wise on ranks {shown}, expected one rank")


def _check_state(
    name: str, before: ParameterSharding, after: ParameterSharding, plan: ModulePlan
) -> None:
    """Raise ValueError if 8-bit state would be cut at other columns than those of its blocks."""
    blocks = [of.name for of in plan.optimizers[name].state if of.dtype == torch.uint8]
    old, new = (
        sorted({(place.first_column, place.columns) for place in places_of(of)})
        for of in (before, after)
    )
    if blocks and old != new:
        raise ValueError(
            f"reshard: table {name!r} has 8-bit {blocks[0]} of columns {old}, but the plan has "
            f"{new}, which have other blocks: keep the columns"
        )


def options_to_compare(changed: Mapping[str, ParameterSharding]) -> dict[str, Any]:
    """Return what all ranks must have alike, by table."""
    return {
        name: [described_sharding(of), comparable(planned_options(of))]
        for name, of in changed.items()
    }


__all__ = [
    "check_stays_in_memory",
    "check_types",
    "described_sharding",
    "moved_tables",
    "options_to_compare",
]
