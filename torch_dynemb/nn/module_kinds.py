"""The registry of modules: their tables and optimizers, read-only copies, what applies commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.optim import FusedOptimizer
from torch_dynemb.policy.keep import Rule

RankChoice = Literal["all", "first", "own"]
RANK_CHOICES: tuple[RankChoice, ...] = ("all", "first", "own")


class KeptTables:
    """Rules for the ids that copies of a model's tables get.

    Args:
        rules: full name and rule of tables on this rank, by ``(id(group), number)``.

    Attributes:
        rules: see the argument.
        names: full names of the tables of all ranks, as far as they are known.
    """

    def __init__(self, rules: Mapping[tuple[int, int], tuple[str, Rule | None]]) -> None:
        self.rules = dict(rules)
        self.names = {name for name, _ in self.rules.values()}


class Choices(NamedTuple):
    """Options of :func:`torch_dynemb.freeze` for copies of tables.

    Attributes:
        ranks: of tables that several ranks share: ``"all"``: every rank gets all rows, ``"first"``:
            the first rank does, ``"own"``: every rank those that it has.
        keep: rules for the ids to copy; None: all ids are copied.
    """

    ranks: RankChoice = "all"
    keep: KeptTables | None = None


class SharedRows(NamedTuple):
    """Ranks that have a table's rows, each some of them.

    Attributes:
        ranks: their process group.
        device: of the rows.
    """

    ranks: dist.ProcessGroup
    device: torch.device


class RowOptimizers(NamedTuple):
    """The optimizers of a module's tables.

    Attributes:
        optimizers: of the rows on this rank; empty: the rows are not trained.
        shared: the ranks that have the rows; None: this process has all of them.
        anchor: a parameter of the module that is not a weight; None: each is one.
    """

    optimizers: Sequence[FusedOptimizer] = ()
    shared: SharedRows | None = None
    anchor: nn.Parameter | None = None


TablesOf = Callable[[Any, str], Iterable[Any]]
FrozenOf = Callable[[Any, Choices], nn.Module | None]
FollowerOf = Callable[[nn.Module], Any]
OptimizersOf = Callable[[Any], RowOptimizers]

_known: dict[str, dict[type[nn.Module], Callable[..., Any]]] = {
    "tables": {},
    "frozen": {},
    "follower": {},
    "optimizers": {},
}


def register_module(
    kind: type[nn.Module],
    *,
    tables: TablesOf | None = None,
    frozen: FrozenOf | None = None,
    follower: FollowerOf | None = None,
    optimizers: OptimizersOf | None = None,
) -> None:
    """Register a class of modules that has tables of its own, and classes made from it.

    Checkpoints, delta logs and ``freeze`` look at the modules of a model from the outside in. They
    do not look into a module of a registered class.

    Args:
        kind: the class.
        tables: takes a module and its path in the model. Gives the
            :class:`torch_dynemb.checkpoint.TablePart` of each table on this rank.
        frozen: takes a module and the :class:`torch_dynemb.serving.Choices` of
            :func:`torch_dynemb.freeze`. Gives a read-only copy; None on a rank that gets none.
        follower: takes a model that has such a module. Gives the
            :class:`torch_dynemb.delta_log.FollowTarget` that applies commits to the model.
        optimizers: takes a module. Gives its :class:`torch_dynemb.nn.RowOptimizers`,
            for :func:`torch_dynemb.table_optimizers` and :func:`torch_dynemb.clip_grad_norm_`,
            which look into it all the same.

    Raises:
        TypeError: ``kind`` is not a class of modules.
        ValueError: the class has one of them already, or none is given.

    Example:
        >>> import torch, torch_dynemb as td
        >>> class Items(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         tables = [td.TableConfig("items", 4)]
        ...         self.group = td.TableGroup(tables, optimizer=td.SGD(lr=0.1))
        >>> def tables(items, path):
        ...     name = td.checkpoint.table_name(path, "items")
        ...     yield td.checkpoint.TablePart(name, items.group, 0, embedding_dim=4)
        >>> td.register_module(Items, tables=tables)
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register_module: kind is {described(kind)}, expected a class of modules")
    given = {"tables": tables, "frozen": frozen, "follower": follower, "optimizers": optimizers}
    added = {what: function for what, function in given.items() if function is not None}
    if not added:
        raise ValueError(
            f"register_module: nothing is given for {kind.__name__}, expected tables, frozen, "
            "follower or optimizers"
        )
    for what in added:
        if kind in _known[what]:
            raise ValueError(
                f"register_module: {what} of {kind.__name__} is {_known[what][kind]!r} already: "
                "register a class made from it"
            )
    for what, function in added.items():
        _known[what][kind] = function


def tables_in(module: nn.Module) -> TablesOf | None:
    """Return the ``tables`` of a module's class; None: neither it nor its base classes have one."""
    found: TablesOf | None = _of("tables", module)
    return found


def frozen_of(module: nn.Module) -> FrozenOf | None:
    """Return the ``frozen`` of a module's class."""
    found: FrozenOf | None = _of("frozen", module)
    return found


def registered_follower(module: nn.Module) -> FollowerOf | None:
    """Return the ``follower`` of a module's class."""
    found: FollowerOf | None = _of("follower", module)
    return found


def optimizers_in(module: nn.Module) -> OptimizersOf | None:
    """Return the ``optimizers`` of a module's class."""
    found: OptimizersOf | None = _of("optimizers", module)
    return found


def _of(what: str, module: nn.Module) -> Any:
    known = _known[what]
    return next((known[kind] for kind in type(module).__mro__ if kind in known), None)


__all__ = [
    "RANK_CHOICES",
    "Choices",
    "FollowerOf",
    "FrozenOf",
    "KeptTables",
    "OptimizersOf",
    "RankChoice",
    "RowOptimizers",
    "SharedRows",
    "TablesOf",
    "frozen_of",
    "optimizers_in",
    "register_module",
    "registered_follower",
    "tables_in",
]
