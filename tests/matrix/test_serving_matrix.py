"""Models that serve: every three options with every other, as numpy has their rows."""

from __future__ import annotations

import pytest
from covering import Case, RanksOf, failures
from serving_space import PACKAGES, SPACE

pytestmark = pytest.mark.cpu_only("live tables are on the CPU")

PARTS = 12
IN_PROCESS = SPACE.having(how=["freeze", "live"])
FOUND = ["how=live rows=fp8 kind=sequences dim=18 updated=log"]  # the smallest cases of faults


@pytest.fixture(scope="module")
def triples() -> list[Case]:
    return IN_PROCESS.cases(3)


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found(ranks_of: RanksOf, found: str) -> None:
    assert failures(SPACE, [SPACE.parsed(found)], ranks_of) == []


@pytest.mark.parametrize("part", range(PARTS))
def test_triples(triples: list[Case], ranks_of: RanksOf, part: int) -> None:
    assert failures(SPACE, triples[part::PARTS], ranks_of) == []


@pytest.mark.exhaustive
@pytest.mark.long
def test_fours(ranks_of: RanksOf) -> None:
    assert failures(SPACE, IN_PROCESS.cases(4), ranks_of) == []


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_pairs_of_packages(ranks_of: RanksOf) -> None:
    assert failures(SPACE, SPACE.having(how=PACKAGES).cases(2), ranks_of) == []


def test_options_have_an_axis_or_a_reason() -> None:
    assert SPACE.unnamed_options() == []
