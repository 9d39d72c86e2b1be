"""Tables of a model that its sharders choose to make dynamic."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torch_dynemb.torchrec.planning.choice import TableChoice, suggestion
from torch_dynemb.torchrec.planning.options import OptionsByTable, constrained_options

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value


def chosen_tables(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints],
) -> frozenset[str]:
    """Return the names of the tables that sharders make dynamic by their ``tables``.

    Args:
        module: the model.
        sharders: of its modules.
        constraints: by table name.

    Raises:
        ValueError: a sharder names an unknown table, a table is chosen in one module and not in
            another, or its constraints contradict the choice.
        TypeError: a function of a sharder has returned something else.
    """
    by_kind = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    in_modules: dict[str, set[str]] = {name: set() for name in by_kind}
    chosen: dict[str, str] = {}
    left: dict[str, str] = {}
    for path, kind, of_kind in _sharded_modules(module, by_kind):
        choice = getattr(by_kind[kind], "choice", None)
        for config in configs_of(of_kind):
            in_modules[kind].add(config.name)
            is_chosen = isinstance(choice, TableChoice) and choice.chooses(config)
            (chosen if is_chosen else left).setdefault(config.name, path)
    for kind, sharder in by_kind.items():
        choice = getattr(sharder, "choice", None)
        if isinstance(choice, TableChoice):
            _check_names(choice, in_modules[kind], set(chosen), set(left))
    for name, path in chosen.items():
        constraint = constraints.get(name)
        if constrained_options(constraint) is not None:
            continue  # of all tables of this name
        if name in left:
            raise ValueError(
                f"DynamicEmbeddingEnumerator: table {name!r} is chosen by the sharder of module "
                f"{path!r}, but not by that of {left[name]!r}, and plans tell tables apart by name "
                "alone: choose both, or rename one"
            )
        if constraint is not None:
            _check_chosen(name, constraint)
    return frozenset(chosen)


def check_child_names(module: nn.Module, dynamic: AbstractSet[str]) -> None:
    """Raise ValueError if a module has a child with dynamic tables under two names.

    Args:
        module: the model.
        dynamic: names of the tables to make dynamic.
    """
    for path, parent in module.named_modules():
        names: dict[nn.Module, str] = {}
        for name, child in parent._modules.items():
            first = name if child is None else names.setdefault(child, name)
            if child is None or first == name:
                continue
            tables = [of.name for part in child.modules() for of in configs_of(part)]
            if not dynamic.isdisjoint(tables):
                raise ValueError(
                    f"DynamicEmbeddingEnumerator: children {first!r} and {name!r} of module "
                    f"{path!r} are one module with dynamic tables, but TorchRec shards a child "
                    "under its first name alone: give the other name to a parent of it, such as "
                    "nn.Sequential(module)"
                )


def _sharded_modules(
    module: nn.Module, kinds: Collection[str]
) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield path, kind and module of what TorchRec shards; it looks for classes by their names."""
    waiting = [("", module)]
    while waiting:
        path, found = waiting.pop()
        kind = sharder_name(type(found))
        if kind in kinds:
            yield path, kind, found
            continue
        waiting += [(f"{path}.{n}" if path else n, m) for n, m in found.named_children()]


def _check_names(choice: TableChoice, own: set[str], chosen: set[str], left: set[str]) -> None:
    """Check the table names that a sharder was given: its tables, or those another one chooses."""
    for argument, names in choice.names().items():
        for name in names:
            if name in own or name in chosen:
                continue
            if name in left:
                raise ValueError(
                    f"{choice.owner}: {argument} has {name!r}, but that table is in a module of "
                    "another class: give its name to the sharder of that class, or leave that "
                    "sharder out if it is of a module around a collection"
                )
            raise ValueError(
                f"{choice.owner}: {argument} has {name!r}, but the tables of its modules are "
                f"{sorted(own)}{suggestion(name, own)}"
            )


def _check_chosen(name: str, constraint: ParameterConstraints) -> None:
    """Check constraints of a table that its sharder makes dynamic."""
    owner = "DynamicEmbeddingEnumerator: constraints"
    for argument in ("compute_kernels", "key_value_params"):
        given = getattr(constraint, argument)
        if given:
            raise ValueError(
                f"{owner} of table {name!r} have {argument} {given!r}, but its sharder's tables "
                f"makes it dynamic: remove {argument}, or leave the table out of tables"
            )
    if isinstance(constraint, OptionsByTable):
        raise ValueError(
            f"{owner} of table {name!r} are a {type(constraint).__name__} of a static table, but "
            "its sharder's tables makes it dynamic: leave it out of tables, or make the "
            "constraints dynamic"
        )
    check_sharding_types("DynamicEmbeddingEnumerator", name, constraint)


def configs_of(module: nn.Module) -> list[BaseEmbeddingConfig]:
    """Return the configs of a collection's tables; another module has none.

    Args:
        module: the collection, or TorchRec's feature-processed one.
    """
    module = getattr(module, "_embedding_bag_collection", module)
    return [
        config
        for method in ("embedding_bag_configs", "embedding_configs")
        for config in getattr(module, method, list)()
    ]


def check_sharding_types(owner: str, name: str, constraint: ParameterConstraints) -> None:
    """Raise ValueError if constraints allow a dynamic table no sharding type but data_parallel."""
    types = constraint.sharding_types or []
    if types and set(types) == {_DATA_PARALLEL}:
        raise ValueError(
            f"{owner}: sharding_types of table {name!r} is {types}: data_parallel would replicate "
            "a dynamic table: use 'row_wise', 'table_wise' or another sharding type, or leave the "
            "table static"
        )


__all__ = ["check_child_names", "check_sharding_types", "chosen_tables", "configs_of"]
