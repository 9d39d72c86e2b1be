"""Lives of a table: every policy with every other, and with what happens between steps."""

from __future__ import annotations

import pytest
from covering import Case, RanksOf, failures
from life_space import SPACE

pytestmark = pytest.mark.any_device

PARTS = 4
FOUND = ["capacity=8 between=reserve"]  # the smallest cases of faults


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found(ranks_of: RanksOf, found: str) -> None:
    assert failures(SPACE, [SPACE.parsed(found)], ranks_of) == []


@pytest.fixture(scope="module")
def pairs() -> list[Case]:
    return SPACE.cases(2)


def test_every_option_has_an_axis() -> None:
    assert SPACE.unnamed_options() == []


@pytest.mark.parametrize("part", range(PARTS))
def test_pairs(pairs: list[Case], ranks_of: RanksOf, part: int) -> None:
    assert failures(SPACE, pairs[part::PARTS], ranks_of) == []


@pytest.mark.long
def test_triples(ranks_of: RanksOf) -> None:
    assert failures(SPACE, SPACE.cases(3), ranks_of) == []
