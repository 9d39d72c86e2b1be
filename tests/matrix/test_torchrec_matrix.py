"""Sharded collections: every option with every other, on one rank and several, as numpy has it."""

from __future__ import annotations

import pytest
from covering import Case, RanksOf, Space, failures

pytest.importorskip("torchrec")

from torchrec_space import SPACE

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

PARTS = 8
FOUND = [  # the smallest cases of faults
    "pooling=none vbe=True",
    "pooling=none vbe=True empty=rank",
    "pooling=none strided=ids freeze=True",
    "ranks=2 output_dtype=FP16",
    "ranks=2 pooling=none output_dtype=BF16",
    "ranks=2 pooling=none vbe=True use_index_dedup=True empty=rank",
]
ONE_RANK, TWO_RANKS = SPACE.having(ranks=[1]), SPACE.having(ranks=[2])


@pytest.fixture(scope="module")
def pairs() -> dict[Space, list[Case]]:
    return {space: space.cases(2) for space in (ONE_RANK, TWO_RANKS)}


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found(ranks_of: RanksOf, found: str) -> None:
    assert failures(SPACE, [SPACE.parsed(found)], ranks_of) == []


@pytest.mark.parametrize("part", range(PARTS))
def test_pairs_on_one_rank(pairs: dict[Space, list[Case]], ranks_of: RanksOf, part: int) -> None:
    assert failures(SPACE, pairs[ONE_RANK][part::PARTS], ranks_of) == []


@pytest.mark.parametrize("part", range(PARTS))
def test_pairs_on_two_ranks(pairs: dict[Space, list[Case]], ranks_of: RanksOf, part: int) -> None:
    assert failures(SPACE, pairs[TWO_RANKS][part::PARTS], ranks_of) == []


@pytest.mark.long
def test_triples(ranks_of: RanksOf) -> None:
    assert failures(SPACE, SPACE.cases(3), ranks_of) == []


def test_options_have_an_axis_or_a_reason() -> None:
    assert SPACE.unnamed_options() == []
