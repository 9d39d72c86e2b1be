"""Covering arrays cover, the same each time; failures keep the options that they need."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from typing import TypedDict

import pytest
import torch
from covering import Case, RanksOf, Space, failures

pytestmark = pytest.mark.any_device


def _wrong(rank: int, case: Case) -> list[str]:
    if case["speed"] == "slow":
        raise ValueError("too slow")
    return ["mixed"] if case["colour"] == "red" and case["large"] else []


class Options(TypedDict):
    """Options of a test."""

    colour: str
    age: int


class Painted(torch.nn.Module):
    def __init__(self, colour: str, *, large: bool) -> None:
        super().__init__()

    def forward(self, speed: str, depth: int) -> None: ...


SPACE = Space(
    "paint",
    axes={
        "colour": ["white", "red", "blue"],
        "large": [False, True],
        "speed": ["normal", "slow", "fast"],
        "number": [1, 2, 3, 4],
    },
    constraints=[
        lambda number, large: number < 4 or not large,
        lambda colour, speed: (colour, speed) != ("blue", "slow"),
    ],
    check=_wrong,
    public=[Options, Painted],
    without_axis={"depth": "none here", "weight": "stale"},
)


def _values(case: Case, axes: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(case[axis] for axis in axes)


@pytest.mark.parametrize("strength", [2, 3])
def test_all_allowed_combinations_are_in_a_case(strength: int) -> None:
    every = [
        dict(zip(SPACE.axes, values, strict=True))
        for values in itertools.product(*SPACE.axes.values())
    ]
    allowed = [case for case in every if SPACE.allows(case)]
    cases = SPACE.cases(strength, seed=3)
    assert all(SPACE.allows(case) for case in cases)
    assert len(cases) < len(allowed)
    for axes in itertools.combinations(SPACE.axes, strength):
        assert {_values(c, axes) for c in cases} == {_values(c, axes) for c in allowed}


def test_a_value_that_hides_others_is_with_each_of_them() -> None:
    hiding = dataclasses.replace(SPACE, hiding={"speed": ["slow"]})
    cases = hiding.cases(2)
    pairs = {
        (axis, case[axis], case["speed"] == "slow")
        for case in cases
        for axis in ("colour", "large", "number")
    }
    values = [(axis, v) for axis in ("colour", "large", "number") for v in SPACE.axes[axis]]
    assert pairs == {(*of, slow) for of in values for slow in (False, True)} - {
        ("colour", "blue", True)
    }
    shown = [case for case in cases if case["speed"] != "slow"]
    assert {_values(case, ("colour", "large")) for case in shown} == {
        *itertools.product(SPACE.axes["colour"], SPACE.axes["large"])
    }


def test_a_seed_gives_the_same_cases() -> None:
    assert SPACE.cases(2, seed=5) == SPACE.cases(2, seed=5) != SPACE.cases(2, seed=6)


def test_a_line_describes_its_case() -> None:
    for case in SPACE.cases(2, seed=7):
        *_, name, described = shlex.split(SPACE.line(case))
        assert (name, SPACE.parsed(described)) == ("paint", case)


def test_failures_keep_the_options_that_they_need(ranks_of: RanksOf) -> None:
    found = failures(SPACE, SPACE.cases(3), ranks_of)
    mixed, slow = sorted(found, key=lambda text: "slow" in text)
    assert mixed == "python tests/matrix/run.py paint 'colour=red large=True'\nmixed"
    first, *_, last = slow.splitlines()
    assert (first, last) == ("python tests/matrix/run.py paint speed=slow", "ValueError: too slow")


def test_options_without_an_axis_are_found() -> None:
    assert SPACE.unnamed_options() == ["age", "weight"]
