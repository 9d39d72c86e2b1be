"""Admission: rules that decide which new ids get a row."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from torch import Tensor

from torch_dynemb.argument_checks import described, integer, number, text
from torch_dynemb.ops.columns import SKETCH_ROWS
from torch_dynemb.policy.half_life import check_half_lives, ticks_of


@dataclass(frozen=True)
class AdmissionRule:
    """Base of the admission rules."""


def _check_threshold(rule: AdmissionRule, given: int) -> None:
    threshold = integer(f"{type(rule).__name__}: threshold", given)
    object.__setattr__(rule, "threshold", threshold)
    if not 1 <= threshold < 1 << 31:  # the largest count of a sketch's cell
        raise ValueError(
            f"{type(rule).__name__}: threshold is {threshold}, expected at least 1 and less than "
            "2^31"
        )


@dataclass(frozen=True, repr=False)
class AdmitFrequent(AdmissionRule):
    """An id gets a row with its ``threshold``-th occurrence in training.

    Occurrences of ids without a row are counted exactly, in a separate hash table:

    * It takes about 23 bytes for each id below the threshold, and for each id without room in a
      full table. Such an id keeps its count and gets a row as soon as it occurs and the table has
      room.
    * The counts are part of the state.
    * They may take a sixth of the memory. In a table with a capacity, at most 64 times as many ids
      are counted, but at least 67 million.
    * ``group.reset_counts`` clears them.

    With a half-life, each occurrence counts half after it: an id gets a row once its decayed count
    reaches the threshold, to a millionth of it. Its frequency then begins with the threshold, or
    with its occurrences in the lookup if these are more.

    Args:
        threshold: occurrences, from 1 to 2^31 - 1.
        half_life: seconds, or a text such as ``"7d"``; time as for score ``"timestamp"``. From 1
            second to 2^32. None: occurrences count in full for ever.
        half_life_steps: the same in optimizer steps, in place of ``half_life``.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of its range, or both half-lives are given.

    Example:
        >>> import torch_dynemb as td
        >>> td.Policy(admission=td.AdmitFrequent(3)).admission
        AdmitFrequent(threshold=3)
        >>> td.AdmitFrequent(3, half_life="7d")
        AdmitFrequent(threshold=3, half_life='7d')
    """

    threshold: int
    half_life: int | str | None = field(default=None, kw_only=True)
    half_life_steps: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_threshold(self, self.threshold)
        if (self.half_life, self.half_life_steps) != (None, None):
            check_half_lives(
                "AdmitFrequent",
                self.half_life,
                self.half_life_steps,
                True,
                f"threshold is {self.threshold}",
                "decayed counts",
            )

    @property
    def half_life_ticks(self) -> int:
        """Half-life of the counts in seconds; below 0: in steps; 0: they do not decay."""
        return ticks_of("AdmitFrequent", self.half_life, self.half_life_steps)

    def __repr__(self) -> str:
        given = {"half_life": self.half_life, "half_life_steps": self.half_life_steps}
        decay = "".join(f", {name}={of!r}" for name, of in given.items() if of is not None)
        return f"AdmitFrequent(threshold={self.threshold}{decay})"


@dataclass(frozen=True)
class AdmitFrequentSketch(AdmissionRule):
    """As :class:`AdmitFrequent`, with counts in a sketch of bounded memory.

    A count-min sketch (Cormode, Muthukrishnan 2005) of four rows with conservative update (Estan,
    Varghese 2002). A count is never too small, but it may be too large, so some ids are admitted
    too early. With cells = memory / 16, the error exceeds e / cells of all occurrences so far with
    probability below e^-4 = 1.8 %.

    Admission keeps an id's count: a sketch cannot forget one id. The sketch is part of the state.

    Args:
        threshold: occurrences, from 1 to 2^31 - 1.
        memory: bytes of the sketch, a number or a text such as ``"16MB"``; at least 16.
        halve_every: steps, at least 1, after which all counts are halved. Recent occurrences then
            weigh more, and the error stays bounded in a table that trains for months. None: never.
        half_life, half_life_steps: of :class:`AdmitFrequent`; a sketch takes neither.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of its range, ``memory`` is a text of another form, or a
            half-life is given.
    """

    threshold: int
    memory: int | str
    halve_every: int | None = None
    half_life: InitVar[object] = field(default=None, kw_only=True)
    half_life_steps: InitVar[object] = field(default=None, kw_only=True)

    def __post_init__(self, half_life: object, half_life_steps: object) -> None:
        _check_threshold(self, self.threshold)
        for name, value in (("half_life", half_life), ("half_life_steps", half_life_steps)):
            if value is not None:
                raise ValueError(
                    f"AdmitFrequentSketch: {name} is {value!r}, but cells of a sketch are shared "
                    "by ids and keep no logarithms: give halve_every=steps, or use "
                    "AdmitFrequent(half_life=)"
                )
        if self.width < 1:
            raise ValueError(
                f"AdmitFrequentSketch: memory is {self.memory!r}, expected at least "
                f"{4 * SKETCH_ROWS} bytes"
            )
        if self.halve_every is not None:
            steps = integer("AdmitFrequentSketch: halve_every", self.halve_every, least=1)
            object.__setattr__(self, "halve_every", steps)

    @property
    def width(self) -> int:
        """Cells of a row."""
        return parse_bytes("AdmitFrequentSketch: memory", self.memory) // (4 * SKETCH_ROWS)


@dataclass(frozen=True)
class AdmitByChance(AdmissionRule):
    """An id gets a row with this probability in each step that looks it up.

    The draw is a function of (seed, table, id, step): the same in every run and on every device.

    Args:
        probability: more than 0, at most 1.

    Raises:
        TypeError: ``probability`` is not a number.
        ValueError: it is out of its range.
    """

    probability: float

    def __post_init__(self) -> None:
        probability = number("AdmitByChance: probability", self.probability)
        object.__setattr__(self, "probability", probability)
        if not 0 < probability <= 1:
            raise ValueError(
                f"AdmitByChance: probability is {self.probability}, expected more than 0 and at "
                "most 1"
            )


@dataclass(frozen=True)
class AdmitNone(AdmissionRule):
    """Training inserts no ids; it only trains ids that have a row."""


class NewIds(NamedTuple):
    """Argument of an admission hook: the ids of a lookup.

    Attributes:
        ids: int64 [n], the ids of the lookups in this table.
        known: bool [n], whether each id has a row.
        step: int64 [1], the optimizer step.
        table: name.
    """

    ids: Tensor
    known: Tensor
    step: Tensor
    table: str


AdmissionHook = Callable[[NewIds], Tensor]
_hooks: dict[str, AdmissionHook] = {}


def register_admission(name: str) -> Callable[[AdmissionHook], AdmissionHook]:
    """Register a function that decides which ids get a row, for :class:`AdmitBy`.

    The function takes :class:`NewIds` and returns bool [n]. A new id gets no row if it is False at
    all its places. The function runs in every training lookup, without grad. To be compiled, it
    must consist of torch operations with shapes that do not depend on values.

    Args:
        name: by which :class:`AdmitBy` finds the function.

    Returns:
        A decorator, which returns the function unchanged.

    Raises:
        TypeError: ``name`` is not a str, or the decorated object is not a function.
        ValueError: another function has the name; that one stays registered.

    Example:
        >>> import torch_dynemb as td
        >>> @td.register_admission("even ids only")
        ... def even(new):
        ...     return new.ids % 2 == 0
        >>> policy = td.Policy(admission=td.AdmitBy("even ids only"))
    """

    text("register_admission: name", name)

    def register(hook: AdmissionHook) -> AdmissionHook:
        if not callable(hook):
            raise TypeError(
                f"register_admission: hook is {described(hook)}, expected a function of NewIds"
            )
        known = _hooks.get(name)
        # allowed: the same function again, from a reloaded module or a notebook's cell
        if known is not None and (known.__module__, known.__qualname__) != (
            hook.__module__,
            hook.__qualname__,
        ):
            raise ValueError(f"register_admission: {name!r} is already {known.__qualname__}")
        _hooks[name] = hook
        return hook

    return register


def admission_hook(name: str) -> AdmissionHook:
    """Return the function registered under a name.

    Raises:
        ValueError: the name is unknown.
    """
    if text("AdmitBy: name", name) not in _hooks:
        raise ValueError(
            f"AdmitBy: no admission hook is named {name!r}, only {sorted(_hooks)}: register it "
            "with torch_dynemb.register_admission before the table is made"
        )
    return _hooks[name]


@dataclass(frozen=True)
class AdmitBy(AdmissionRule):
    """A registered function decides; see :func:`register_admission`.

    Args:
        name: of a registered function.

    Raises:
        TypeError: ``name`` is not a str.
        ValueError: the name is unknown.
    """

    name: str

    def __post_init__(self) -> None:
        admission_hook(self.name)


_UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_bytes(owner: str, size: int | str) -> int:
    """Return a number of bytes, from a number or a text such as ``"4GB"`` or ``"1.5 GiB"``.

    Raises:
        TypeError, ValueError: neither, or less than 1.
    """
    expected = "expected a number of bytes or a text such as '4GB' or '512MiB'"
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", size.strip().lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"{owner} is {size!r}, {expected}")
        size = int(float(match[1]) * _UNITS[match[2]])
    size = integer(owner, size, what=expected.removeprefix("expected "))
    if size < 1:
        raise ValueError(f"{owner} is {size}, expected at least 1 byte")
    return size


__all__ = [
    "AdmissionRule",
    "AdmitBy",
    "AdmitByChance",
    "AdmitFrequent",
    "AdmitFrequentSketch",
    "AdmitNone",
    "NewIds",
    "admission_hook",
    "parse_bytes",
    "register_admission",
]
