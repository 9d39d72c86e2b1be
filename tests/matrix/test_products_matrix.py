"""RecIS's and OneEmbedding's modules: every option with every other, as numpy has them."""

from __future__ import annotations

import oneembedding_space
import pytest
import recis_space
from covering import Case, RanksOf, Space, failures

pytestmark = pytest.mark.cpu_only("several ranks over gloo, and stores of the CPU")

PARTS = 16
SPACES = {space.name: space for space in (recis_space.SPACE, oneembedding_space.SPACE)}
FOUND = [  # the smallest cases of faults
    ("oneembedding", "empty=True scaler=True"),
]


@pytest.fixture(scope="module", params=SPACES)
def space(request: pytest.FixtureRequest) -> Space:
    return SPACES[request.param]


@pytest.fixture(scope="module")
def pairs(space: Space) -> list[Case]:
    return space.cases(2)


@pytest.mark.parametrize(("name", "found"), FOUND)
def test_what_was_found(ranks_of: RanksOf, name: str, found: str) -> None:
    assert failures(SPACES[name], [SPACES[name].parsed(found)], ranks_of) == []


@pytest.mark.parametrize("part", range(PARTS))
def test_pairs(space: Space, pairs: list[Case], ranks_of: RanksOf, part: int) -> None:
    assert failures(space, pairs[part::PARTS], ranks_of) == []


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_triples(space: Space, ranks_of: RanksOf) -> None:
    assert failures(space, space.cases(3), ranks_of) == []


def test_options_have_an_axis_or_a_reason(space: Space) -> None:
    assert space.unnamed_options() == []
