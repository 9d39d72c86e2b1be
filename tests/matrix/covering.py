"""Every option with every other: covering arrays, and failures with few options left.

A space has an axis for each option, with its values. A case takes one value of each axis. Every
pair of values that constraints allow is in a case of strength 2, every triple in one of strength 3.
"""

from __future__ import annotations

import inspect
import os
import shlex
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import covertable
import torch
import torch.distributed as dist
from ranks import Ranks

Case = dict[str, Any]  # axis -> value, and "seed" of what is drawn
RanksOf = Callable[[int], Ranks]  # by their number


@dataclass(frozen=True, eq=False)
class Space:
    """Axes, what goes together, and an oracle.

    Attributes:
        name: of the space, for :mod:`run`.
        axes: name -> values; the first value is plain. Their texts have no spaces.
        constraints: predicates, the parameters of which are names of axes.
        check: called with (rank, case); returns what is wrong, empty if nothing. It is a function
            of a module, so that ranks find it. With an axis ``ranks`` there is a process group.
        then: called after ``check`` on as many ranks as the axis ``target_ranks`` has. Both find a
            folder in ``case["folder"]``.
        public: functions, classes and TypedDicts that have the options.
        without_axis: option -> why it is in no axis.
        hiding: axis -> values with which other options have little effect.
    """

    name: str
    axes: Mapping[str, Sequence[Any]]
    constraints: Sequence[Callable[..., bool]]
    check: Callable[[int, Case], list[str]]
    then: Callable[[int, Case], list[str]] | None = None
    public: Sequence[Any] = ()
    without_axis: Mapping[str, str] = field(default_factory=dict)
    hiding: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def having(self, **axes: Sequence[Any]) -> Space:
        """Return the space with other values of some axes."""
        return replace(self, axes={**self.axes, **axes})

    def plain(self) -> Case:
        """Return the first value of each axis."""
        return {**{axis: values[0] for axis, values in self.axes.items()}, "seed": 0}

    def allows(self, case: Case) -> bool:
        """Return whether the values go together."""
        return all(allowed(**{n: case[n] for n in _names(allowed)}) for allowed in self.constraints)

    def cases(self, strength: int, seed: int = 0) -> list[Case]:
        """Return the cases of a covering array: the same for the same seed.

        Values that hide others are in cases of their own, one such value in each.
        """
        shown = self.having(
            **{
                axis: [value for value in self.axes[axis] if value not in hiding]
                for axis, hiding in self.hiding.items()
            }
        )
        found = shown._array(strength, seed)
        for axis, hiding in self.hiding.items():
            for value in hiding:
                found += shown.having(**{axis: [value]})._array(strength - 1, seed)
        return found

    def _array(self, strength: int, seed: int) -> list[Case]:
        found = covertable.make(
            [list(values) for values in self.axes.values()],
            strength=strength,
            salt=str(seed),
            criterion=covertable.criteria.simple,
            constraints=[self._condition(allowed) for allowed in self.constraints],
        )
        return [{**dict(zip(self.axes, case, strict=True)), "seed": seed} for case in found]

    def _condition(self, allowed: Callable[..., bool]) -> dict[str, Any]:
        """Return a constraint as covertable takes it, which knows axes by number."""
        numbers = {axis: number for number, axis in enumerate(self.axes)}
        names = _names(allowed)
        return {
            "operator": "fn",
            "requires": [numbers[name] for name in names],
            "evaluate": lambda row: bool(allowed(**{name: row[numbers[name]] for name in names})),
        }

    def line(self, case: Case) -> str:
        """Return a command that runs a case."""
        return f"python tests/matrix/run.py {self.name} {shlex.quote(self.described(case))}"

    def described(self, case: Case) -> str:
        """Return the values that are not plain."""
        plain = self.plain()
        return " ".join(f"{n}={value}" for n, value in case.items() if value != plain[n])

    def parsed(self, text: str) -> Case:
        """Return the case that :meth:`described` has described."""
        case = self.plain()
        for name, _, given in (part.partition("=") for part in text.split()):
            values = (int(given),) if name == "seed" else self.axes[name]
            (case[name],) = [value for value in values if str(value) == given]
        return case

    def unnamed_options(self) -> list[str]:
        """Return public options without an axis or a reason, and reasons without an option."""
        options = {name for of in self.public for name in _options(of)}
        stale = {name for name in self.without_axis if name not in options or name in self.axes}
        return sorted({*options} - {*self.axes} - {*self.without_axis} | stale)


def _names(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _options(of: Any) -> list[str]:
    names = list(of.__annotations__) if hasattr(of, "__required_keys__") else _names(of)
    if isinstance(of, type) and issubclass(of, torch.nn.Module):
        names += _names(of.forward)
    return [name for name in names if name != "self"]


def wrong(space: Space, case: Case, ranks_of: RanksOf) -> list[str]:
    """Return what is wrong with a case, on any rank; errors are."""
    if space.then is None:
        return _wrong(space.check, case, case.get("ranks"), ranks_of)
    with TemporaryDirectory() as folder:
        case = {**case, "folder": folder}
        return _wrong(space.check, case, case["ranks"], ranks_of) or _wrong(
            space.then, case, case["target_ranks"], ranks_of
        )


def _wrong(
    check: Callable[[int, Case], list[str]], case: Case, number: int | None, ranks_of: RanksOf
) -> list[str]:
    if number is not None and number > 1:
        ranks = ranks_of(number)
        outcomes = ranks.outcomes(check, case)
        if not all(good for good, _ in outcomes):
            ranks.stop()  # some may be in the midst of a collective
        found = [text for good, of in outcomes for text in (of if good else [_last_lines(of)])]
        return list(dict.fromkeys(found))
    torch.manual_seed(0)
    try:
        with _alone() if number else nullcontext():
            return check(0, case)
    except Exception:
        return [_last_lines(traceback.format_exc())]


def _last_lines(of: str) -> str:
    return "raised:\n" + "\n".join(of.strip().splitlines()[-14:])


@contextmanager
def folder_of_ranks() -> Iterator[str]:
    """Give the ranks of a case one folder; a case may also be without ranks."""
    with TemporaryDirectory() as folder:
        of_first = [folder]
        if dist.is_initialized():
            dist.broadcast_object_list(of_first)
        yield of_first[0]
        if dist.is_initialized():
            dist.barrier()  # before the folder goes


@contextmanager
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
            yield
    finally:
        dist.destroy_process_group()


def shrunk(space: Space, case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return a case that fails with as few values as possible that are not plain."""
    plain, smaller = space.plain(), True
    while smaller:
        smaller = False
        for name in [name for name in case if case[name] != plain[name]]:
            simpler = {**case, name: plain[name]}
            if space.allows(simpler) and fails(simpler):
                case, smaller = simpler, True
    return case


def failures(space: Space, cases: Iterable[Case], ranks_of: RanksOf) -> list[str]:
    """Run cases; return for each kind of failure the options that it needs, and what is wrong."""
    found: list[tuple[Case, str]] = []
    for case in cases:
        if not wrong(space, case, ranks_of):
            continue
        if any(_contains(space, case, small) for small, _ in found):
            continue
        small = shrunk(space, case, lambda of: bool(wrong(space, of, ranks_of)))
        texts = wrong(space, small, ranks_of) or ["right when it was run again"]
        found.append((small, "\n".join([space.line(small), *texts])))
    return [text for _, text in found]


def _contains(space: Space, case: Case, small: Case) -> bool:
    plain = space.plain()
    return all(case[name] == value for name, value in small.items() if value != plain[name])
