"""Sharded collections: every option with every other, on one rank and several, as numpy has it."""

from __future__ import annotations

import pytest
from covering import Case, RanksOf, failures

pytest.importorskip("torchrec")

from sharded_models import FOUR_RANKS
from torchrec_space import SPACE

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

PARTS = 12
FOUND = [  # the smallest cases of faults
    "pooling=none vbe=True",
    "pooling=none vbe=True empty=rank",
    "pooling=none strided=ids freeze=True",
    "pooling=mean weighted=True beside=static data_type=FP16 freeze=True",
    "ranks=2 output_dtype=FP16",
    "ranks=2 pooling=none output_dtype=BF16",
    "ranks=2 pooling=none vbe=True use_index_dedup=True empty=rank",
]


@pytest.fixture(scope="module")
def pairs() -> list[Case]:
    return SPACE.having(ranks=[1]).cases(2)


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found(ranks_of: RanksOf, found: str) -> None:
    assert failures(SPACE, [SPACE.parsed(found)], ranks_of) == []


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("ranks", [1, 2])
def test_pairs(pairs: list[Case], ranks_of: RanksOf, ranks: int, part: int) -> None:
    cases = [{**case, "ranks": ranks} for case in pairs[part :: PARTS * ranks]]  # some on two
    assert failures(SPACE, cases, ranks_of) == []


@pytest.mark.parametrize("part", range(PARTS))
def test_pairs_on_two_nodes(pairs: list[Case], ranks_of: RanksOf, part: int) -> None:
    cases = [{**case, "ranks": 4} for case in pairs if case["sharding"] in FOUR_RANKS]
    assert failures(SPACE, cases[part :: 2 * PARTS], ranks_of) == []


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_triples(ranks_of: RanksOf) -> None:
    assert failures(SPACE, SPACE.cases(3), ranks_of) == []


def test_options_have_an_axis_or_a_reason() -> None:
    assert SPACE.unnamed_options() == []
