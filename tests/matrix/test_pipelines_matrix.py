"""TorchRec's pipelines: every option with every other, on one rank and on two, as numpy has it."""

from __future__ import annotations

import pytest
from covering import Case, RanksOf, failures

pytest.importorskip("torchrec")

from pipelines_space import SPACE

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

PARTS = 20


@pytest.fixture(scope="module")
def pairs() -> list[Case]:
    return SPACE.cases(2)


@pytest.mark.parametrize("part", range(PARTS))
def test_pairs(pairs: list[Case], ranks_of: RanksOf, part: int) -> None:
    assert failures(SPACE, pairs[part::PARTS], ranks_of) == []


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_triples(ranks_of: RanksOf) -> None:
    assert failures(SPACE, SPACE.cases(3), ranks_of) == []
