"""Modules and collections: every option with every other, as nn.functional and numpy have it."""

from __future__ import annotations

import pytest
from covering import Case, RanksOf, failures
from modules_space import SPACE

pytestmark = pytest.mark.cpu_only("compilers, autocast and stores of the CPU")

PARTS = 16
FOUND = [  # the smallest cases of faults
    "split=True lookups=2 run=compiled_autograd",
]


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found(ranks_of: RanksOf, found: str) -> None:
    assert failures(SPACE, [SPACE.parsed(found)], ranks_of) == []


@pytest.fixture(scope="module")
def pairs() -> list[Case]:
    """Dynamo takes longer: only where backward needs it, on no ranks."""
    cases = SPACE.having(run=["eager", "compiled_autograd"]).cases(2)
    return [case if case["run"] == "eager" else {**case, "ranks": 0} for case in cases]


@pytest.mark.filterwarnings("ignore:.*backwards came before it:RuntimeWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_pairs(pairs: list[Case], ranks_of: RanksOf, part: int) -> None:
    assert failures(SPACE, pairs[part::PARTS], ranks_of) == []


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:.*backwards came before it:RuntimeWarning")
def test_triples(ranks_of: RanksOf) -> None:
    assert failures(SPACE, SPACE.cases(3), ranks_of) == []


def test_options_have_an_axis_or_a_reason() -> None:
    assert SPACE.unnamed_options() == []
