"""Saved tables: every option with every other, as numpy has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from covering import Case, RanksOf, failures, wrong
from saving_space import REFUSED, SPACE, check_as_given

pytestmark = pytest.mark.cpu_only("several ranks over gloo")

PARTS = 24
FOUND = ["save=increment policy=admission"]  # no pairs find lost counts of admission


@pytest.fixture(scope="module")
def pairs() -> list[Case]:
    return SPACE.cases(2)


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found(ranks_of: RanksOf, found: str) -> None:
    assert failures(SPACE, [SPACE.parsed(found)], ranks_of) == []


@pytest.mark.parametrize("part", range(PARTS))
def test_pairs(pairs: list[Case], ranks_of: RanksOf, part: int) -> None:
    assert failures(SPACE, pairs[part::PARTS], ranks_of) == []


@pytest.mark.exhaustive
@pytest.mark.long
def test_triples(ranks_of: RanksOf) -> None:
    assert failures(SPACE, SPACE.cases(3), ranks_of) == []


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(ranks_of: RanksOf, case: str) -> None:
    (text,) = wrong(replace(SPACE, check=check_as_given), SPACE.parsed(case), ranks_of)
    assert REFUSED[case] in text


def test_options_have_an_axis_or_a_reason() -> None:
    assert SPACE.unnamed_options() == []
