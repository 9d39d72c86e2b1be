"""Tables that a sharder makes dynamic, and their options, as its arguments give them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torch_dynemb.argument_checks import described
from torch_dynemb.torchrec.planning.options import TableOptions, is_dynamic, planned_options

ChosenTables = Literal["all"] | Collection[str] | Callable[[BaseEmbeddingConfig], bool]
OptionsOfTables = (
    TableOptions | Mapping[str, TableOptions] | Callable[[BaseEmbeddingConfig], TableOptions]
)
# whether a DynamicEmbeddingEnumerator, which can price dynamic tables, asks the sharders
_enumerating: ContextVar[bool] = ContextVar("enumerating", default=False)


class TableChoice:
    """Arguments ``tables`` and ``options`` of a sharder.

    Args:
        owner: the sharder, for messages.
        tables: that become dynamic; None: those of the plan alone.
        options: of dynamic tables without options in the plan: of all, by name, or by config.

    Raises:
        TypeError: another type.
        ValueError: ``tables`` is a name.
    """

    def __init__(
        self, owner: str, tables: ChosenTables | None, options: OptionsOfTables | None
    ) -> None:
        self.owner = owner
        self._tables = _checked_tables(owner, tables)
        self._options = _checked_options(owner, options)

    @property
    def chooses_any(self) -> bool:
        """Whether the sharder was given ``tables``."""
        return self._tables is not None

    def names(self) -> dict[str, list[str]]:
        """Return the table names in the arguments, by argument; without ``tables`` none."""
        if self._tables is None:
            return {}
        tables, options = self._tables, self._options
        return {
            "tables": [] if tables == "all" or callable(tables) else list(tables),
            "options": list(options) if isinstance(options, Mapping) else [],
        }

    def chooses(self, config: BaseEmbeddingConfig) -> bool:
        """Return whether the table with this config becomes dynamic.

        Raises:
            TypeError: the function ``tables`` has returned another value than a bool.
        """
        if self._tables is None:
            return False
        if self._tables == "all":
            return True
        if not callable(self._tables):
            return config.name in self._tables
        chosen = self._tables(config)
        if not isinstance(chosen, bool):
            raise TypeError(
                f"{self.owner}: tables has returned {described(chosen)} for table "
                f"{config.name!r}, expected True or False"
            )
        return chosen

    def names_options_of(self, name: str) -> bool:
        """Return whether ``options`` is a dict with this table."""
        return isinstance(self._options, Mapping) and name in self._options

    def options_of(self, config: BaseEmbeddingConfig) -> TableOptions | None:
        """Return the options of the table with this config; None: the sharder was given none.

        Chosen tables without options have the default ones.

        Raises:
            TypeError: the function ``options`` has returned something else.
        """
        options = self._options
        if isinstance(options, TableOptions):
            return options
        if callable(options):
            given = options(config)
            if not isinstance(given, TableOptions):
                raise TypeError(
                    f"{self.owner}: options has returned {described(given)} for table "
                    f"{config.name!r}, expected TableOptions(...)"
                )
            return given
        given = options.get(config.name)
        return TableOptions() if given is None and self.chooses(config) else given

    def of_module(
        self, configs: Sequence[Any], shardings: Mapping[str, ParameterSharding]
    ) -> dict[str, TableOptions]:
        """Return options for the tables of a module that have none in its plan.

        Args:
            configs: of the tables.
            shardings: plan of the module.

        Raises:
            TypeError: a function has returned something else.
        """
        given = {}
        for config in configs:
            sharding = shardings.get(config.name)
            options_planned = sharding is not None and planned_options(sharding) is not None
            wanted = self.chooses(config) or (sharding is not None and is_dynamic(sharding))
            # options by name must meet no others; a plan's options replace more general ones
            if self.names_options_of(config.name) or (wanted and not options_planned):
                options = self.options_of(config)
                if options is not None:
                    given[config.name] = options
        return given

    def check_planner(self) -> None:
        """Raise ValueError if TorchRec's own enumerator plans chosen tables."""
        if self.chooses_any and not _enumerating.get():
            raise ValueError(
                f"{self.owner}: tables makes tables dynamic, but TorchRec's EmbeddingEnumerator "
                "cannot price these: plan with DynamicEmbeddingShardingPlanner()."
                "collective_plan(model, sharders) and give DistributedModelParallel plan=, or give "
                "EmbeddingShardingPlanner enumerator=dynamic_enumerator(topology, constraints)"
            )


@contextmanager
def enumerating() -> Iterator[None]:
    """Mark that an enumerator which can price dynamic tables asks sharders for their kernels."""
    token = _enumerating.set(True)
    try:
        yield
    finally:
        _enumerating.reset(token)


def suggestion(name: str, known: Collection[str]) -> str:
    """Return the part of a message that suggests a known name; empty: none is near."""
    near = difflib.get_close_matches(name, known, 1)
    return f". Did you mean {near[0]!r}?" if near else ""


def _checked_tables(owner: str, tables: Any) -> Any:
    expected = "'all', a list of table names, or a function of a table's config"
    if tables is None or tables == "all" or callable(tables):
        return tables
    if isinstance(tables, str):
        raise ValueError(
            f"{owner}: tables is {tables!r}, expected {expected}: for one table [{tables!r}]"
        )
    if isinstance(tables, Mapping):
        raise TypeError(
            f"{owner}: tables is {described(tables)}, expected {expected}: options= takes a dict "
            "of TableOptions by name"
        )
    if not isinstance(tables, Collection) or not all(isinstance(name, str) for name in tables):
        raise TypeError(f"{owner}: tables is {described(tables)}, expected {expected}")
    return tuple(tables)


def _checked_options(owner: str, options: Any) -> Any:
    if options is None:
        return {}
    if isinstance(options, TableOptions) or callable(options):
        return options
    if not isinstance(options, Mapping):
        raise TypeError(
            f"{owner}: options is {described(options)}, expected TableOptions(...), a dict: "
            "TableOptions(...) by table name, or a function of a table's config"
        )
    for name, given in options.items():
        if not isinstance(given, TableOptions):
            raise TypeError(f"{owner}: options[{name!r}] is {given!r}, expected TableOptions(...)")
    return dict(options)


__all__ = ["ChosenTables", "OptionsOfTables", "TableChoice", "enumerating", "suggestion"]
