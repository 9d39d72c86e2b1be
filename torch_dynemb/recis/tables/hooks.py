"""Hooks by name, from registries that users extend: admission of ids and removal of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch_dynemb.argument_checks import described, integer, text
from torch_dynemb.policy import AdmitByChance, AdmitFrequent, Custom
from torch_dynemb.policy.admission import AdmissionRule
from torch_dynemb.policy.policy import Score
from torch_dynemb.table import TableGroup


@dataclass(frozen=True)
class FilterHook:
    """Periodic removal of rows. Tables must agree on it to share a physical table.

    Args:
        name: of a registered filter; ``"GlobalStepFilter"`` is built in.
        params: its parameters. GlobalStepFilter removes a row after ``filter_step`` steps without a
            training lookup, and checks every ``filter_interval`` steps (default 100).

    Raises:
        TypeError: ``name`` is not a string, or ``params`` is not a dict.
        ValueError: unknown filter, or unknown parameters.

    Example:
        >>> FilterHook("GlobalStepFilter", {"filter_step": 1000, "filter_interval": 10}).name
        'GlobalStepFilter'
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_hook("FilterHook", self.name, self.params)
        object.__setattr__(self, "params", dict(self.params))
        self.make()

    def make(self) -> RowFilter:
        """Make a new filter: tables share nothing.

        Raises:
            ValueError: this process has not registered the filter of a hook that was pickled in
                another, or ``params`` was changed to invalid ones.
        """
        made: RowFilter = _made("FilterHook", self.name, self.params, _FILTERS)
        return made


@dataclass(frozen=True)
class AdmitHook:
    """Admission rule: which ids get a row at their first training lookup.

    Args:
        name: of a registered rule. Built in: ``"ReadOnly"`` (none; they read zeros),
            ``"Frequency"`` (those seen ``threshold`` times; with ``half_life`` or
            ``half_life_steps`` as of :class:`torch_dynemb.AdmitFrequent`), ``"Probability"`` (each
            time with ``probability``).
        params: its parameters.

    Raises:
        TypeError: ``name`` is not a string, or ``params`` is not a dict.
        ValueError: unknown rule, or unknown parameters.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_hook("AdmitHook", self.name, self.params)
        object.__setattr__(self, "params", dict(self.params))
        self.make()

    def make(self) -> AdmissionRule | ReadOnly:
        """Make the rule.

        Raises:
            ValueError: this process has not registered the rule of a hook that was pickled in
                another, or ``params`` was changed to invalid ones.
        """
        made: AdmissionRule | ReadOnly = _made("AdmitHook", self.name, self.params, _ADMISSIONS)
        return made


ReadOnly = Literal["read_only"]
READ_ONLY: ReadOnly = "read_only"


class RowFilter:
    """Base of the filters.

    Attributes:
        interval: optimizer steps between two calls of :meth:`remove`.
        scores: scores of an id that it needs, such as ``("step",)``; see
            :class:`torch_dynemb.Policy`.
    """

    interval: int = 100
    scores: tuple[Score | Custom, ...] = ()

    def remove(self, group: TableGroup, table: int) -> int:
        """Remove rows of a table, such as by ``group.remove(table, ...)``.

        Args:
            group: the tables; see :class:`torch_dynemb.TableGroup`.
            table: number of the table to filter.

        Returns:
            Number of removed rows.

        Raises:
            NotImplementedError: the filter does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define remove(): a subclass removes ids of a "
            "table there"
        )


FilterFactory = Callable[..., RowFilter]
AdmitFactory = Callable[..., AdmissionRule | ReadOnly]
_FILTERS: dict[str, FilterFactory] = {}
_ADMISSIONS: dict[str, AdmitFactory] = {}


def _check_hook(kind: str, name: object, params: object) -> None:
    text(f"{kind}: name", name)
    if not isinstance(params, Mapping):
        raise TypeError(f"{kind}: params is {described(params)}, expected a dict")


def _made(kind: str, name: str, params: Mapping[str, Any], registry: Mapping[str, Any]) -> Any:
    if name not in registry:
        raise ValueError(f"{kind}: name is {name!r}, expected one of {sorted(registry)}")
    try:
        return registry[name](**params)
    except TypeError as error:
        raise ValueError(f"{kind} {name!r}: params is {dict(params)}: {error}") from error


def _register(kind: str, name: str, registry: dict[str, Any], factory: Any) -> Any:
    if name in registry:
        raise ValueError(f"register_{kind}: {name!r} is registered already")
    registry[name] = factory
    return factory


def register_filter_hook(name: str) -> Callable[[FilterFactory], FilterFactory]:
    """Register a function from parameters to a :class:`RowFilter` as ``FilterHook(name)``.

    Args:
        name: of the hook, new to the process.

    Returns:
        A decorator that returns its argument.

    Raises:
        ValueError: the name is taken.

    Example:
        >>> import torch_dynemb as td
        >>> @register_filter_hook("FadedRows")
        ... class FadedRows(RowFilter):
        ...     def __init__(self, norm: float) -> None:
        ...         self.norm = norm
        ...     def remove(self, group, table):
        ...         return group.remove(table, norm_below=self.norm)
        >>> FilterHook("FadedRows", {"norm": 1e-6}).make().interval
        100
    """
    return lambda factory: _register("filter_hook", name, _FILTERS, factory)


def register_admit_hook(name: str) -> Callable[[AdmitFactory], AdmitFactory]:
    """Register a function from parameters to an admission rule as ``AdmitHook(name)``.

    The rule is one of torch_dynemb's (``AdmitBy`` calls a custom function), or ``READ_ONLY``.

    Args:
        name: of the hook, new to the process.

    Returns:
        A decorator that returns its argument.

    Raises:
        ValueError: the name is taken.
    """
    return lambda factory: _register("admit_hook", name, _ADMISSIONS, factory)


@register_filter_hook("GlobalStepFilter")
class GlobalStepFilter(RowFilter):
    """Filter of rows without a training lookup in the last ``filter_step`` steps."""

    scores = ("step",)

    def __init__(self, filter_step: int, filter_interval: int = 100) -> None:
        self.filter_step = integer("GlobalStepFilter: filter_step", filter_step, least=1)
        self.interval = integer("GlobalStepFilter: filter_interval", filter_interval, least=1)

    def remove(self, group: TableGroup, table: int) -> int:
        return group.remove(table, not_seen_for=self.filter_step)


@register_admit_hook("ReadOnly")
def _read_only() -> ReadOnly:
    return READ_ONLY


@register_admit_hook("Frequency")
def _frequency(
    threshold: int, half_life: int | str | None = None, half_life_steps: int | None = None
) -> AdmissionRule:
    return AdmitFrequent(threshold, half_life=half_life, half_life_steps=half_life_steps)


@register_admit_hook("Probability")
def _probability(probability: float) -> AdmissionRule:
    return AdmitByChance(probability)
