"""Sharded models, saved and loaded into other shards: every option with every other, by numpy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from covering import Case, RanksOf, failures, wrong

pytest.importorskip("torchrec")

from sharded_saving_space import REFUSED, SPACE, load_as_given, save_as_given

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

PARTS = 84
FOUND = [  # the smallest cases of faults
    "save=state_dict policy=ttl",
    "ranks=2 save=increment sharding=column_wise optimizer=row_wise_adagrad",
    "target_ranks=2 save=log target_sharding=column_wise optimizer=adam log_optimizer_state=True"
    " followed=True",
]
TWO_NODES = [  # four ranks on one side: of u, which has the next sharding, too
    "ranks=4 sharding=table_row_wise target_sharding=row_wise optimizer=row_wise_adagrad",
    "target_ranks=4 sharding=row_wise target_sharding=table_row_wise optimizer=row_wise_adagrad",
]


@pytest.fixture(scope="module")
def pairs() -> list[Case]:
    # snapshots of two ranks take more than a second: test_pairs_of_four_ranks has them
    cases = SPACE.having(ranks=[1, 2], target_ranks=[1, 2]).cases(2)
    return [case for case in cases if case["save"] != "snapshot" or case["ranks"] == 1]


@pytest.mark.parametrize("found", FOUND)
def test_what_was_found(ranks_of: RanksOf, found: str) -> None:
    assert failures(SPACE, [SPACE.parsed(found)], ranks_of) == []


@pytest.mark.parametrize("part", range(PARTS))
def test_pairs(pairs: list[Case], ranks_of: RanksOf, part: int) -> None:
    assert failures(SPACE, pairs[part::PARTS], ranks_of) == []


@pytest.mark.long
@pytest.mark.parametrize("case", TWO_NODES)
def test_two_nodes(ranks_of: RanksOf, case: str) -> None:
    assert failures(SPACE, [SPACE.parsed(case)], ranks_of) == []


@pytest.mark.long
def test_pairs_of_four_ranks(ranks_of: RanksOf) -> None:
    assert failures(SPACE, SPACE.cases(2), ranks_of) == []


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_triples(ranks_of: RanksOf) -> None:
    assert failures(SPACE, SPACE.cases(3), ranks_of) == []


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(ranks_of: RanksOf, case: str) -> None:
    as_given = replace(SPACE, check=save_as_given, then=load_as_given)
    text, *_ = wrong(as_given, SPACE.parsed(case), ranks_of)
    assert REFUSED[case] in text


def test_options_have_an_axis_or_a_reason() -> None:
    assert SPACE.unnamed_options() == []
