"""Scores of ids: from weights of a KeyedJaggedTensor, and those of evicted ids."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from ranks import Ranks
from refused_models import refusal
from score_steps import (
    FROM_WEIGHTS,
    decayed_admission,
    evicted,
    weights_become_scores,
    wrong_weights,
)
from sharded_models import BAG_SHARDINGS, FOUR_RANKS, SEQUENCE_SHARDINGS, Table

import torch_dynemb as td
from torch_dynemb.compat.dynamicemb import pop_evicted_keys
from torch_dynemb.torchrec import TableOptions

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

SHORT = (
    ("row_wise", "sum", "decayed_sum"),
    ("table_wise", "sum", "sum"),
    ("row_wise", "none", "last"),
)
CASES = [
    pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
    for case in (
        *((sharding, "sum", "decayed_sum") for sharding in BAG_SHARDINGS),
        *((sharding, "none", "last") for sharding in SEQUENCE_SHARDINGS),
        ("table_wise", "sum", "sum"),
        ("row_wise", "mean", "max"),
    )
]


@pytest.mark.parametrize(("sharding", "pooling", "combine"), CASES)
def test_weights_become_scores(
    request: pytest.FixtureRequest, sharding: str, pooling: str, combine: str
) -> None:
    ranks: Ranks = request.getfixturevalue("four_ranks" if sharding in FOUR_RANKS else "two_ranks")
    assert min(ranks.run(weights_become_scores, sharding, pooling, combine)) > 10


def test_occurrences_of_all_ranks_fade(two_ranks: Ranks) -> None:
    (with_row, faded), other = two_ranks.run(decayed_admission)
    assert (with_row, faded) == other
    assert min(with_row, faded) > 5
    timed = td.Policy(admission=td.AdmitFrequent(2, half_life="1d"))
    assert TableOptions(policy=timed).keeps_time


def test_weights_that_cannot_be_scores(two_ranks: Ranks) -> None:
    for none, nan, infinite, negative in two_ranks.run(wrong_weights):
        assert none == (
            "rank 0: EmbeddingBagCollection: features has no weights, but those of ['b'] are "
            "scores by score_from='weights': give weights=, one for every id"
        )
        assert "weights of feature 'b' have nan, but are scores" in nan
        assert "weights of feature 'b' have -inf, but are scores" in infinite
        assert "weights of feature 'b' have -0.5, but are scores" in negative
        assert negative.endswith("give numbers from 0 on, below 2^63")


def test_what_sends_no_weights_is_refused(two_ranks: Ranks) -> None:
    scored = Table("scored", 8, ("a",))
    static = Table("static", 8, ("b",), dynamic=False)
    options = {"options": {"scored": FROM_WEIGHTS}}
    for said in two_ranks.run(refusal, (scored, static), options):
        assert said.startswith(
            "NotImplementedError: EmbeddingBagCollection: tables ['scored'] have score_from="
            "'weights', but tables ['static'] are static, and TorchRec would weight their bags"
        )
    for pooling, owner in (("sum", "EmbeddingBagCollection"), ("none", "EmbeddingCollection")):
        one = (replace(scored, pooling=pooling),)
        for said in two_ranks.run(refusal, one, {**options, "use_index_dedup": True}):
            assert said.startswith(
                f"NotImplementedError: {owner}: tables ['scored'] have score_from='weights', but "
                "use_index_dedup sends each distinct id once"
            )


def test_evicted_ids_are_taken_once(two_ranks: Ranks) -> None:
    results = two_ranks.run(evicted)
    early = [own["model.bags"]["recorded"] for own, _, _, _ in results]
    assert not set(early[0].tolist()) & set(early[1].tolist())  # each rank owns its ids
    for own, together, left, rest in results:
        assert list(own["model.bags"]) == ["recorded"]
        later = together["model.bags"]["recorded"]
        assert later.numel() > 0
        assert torch.cat([*early, later, torch.tensor(left)]).sort().values.tolist() == list(
            range(72)
        )
        assert rest["model.bags"]["recorded"].numel() == 0


@pytest.mark.parametrize("wrong", [3, {"model.bags": "recorded"}, {"model.bags": 3}], ids=str)
def test_wrong_names_of_evicted_ids(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"expected a (dict with a )?list of table names"):
        pop_evicted_keys(torch.nn.Linear(1, 1), wrong)  # type: ignore[arg-type]


def test_wrong_sources_of_scores() -> None:
    custom = td.Policy(score="custom")
    with pytest.raises(ValueError, match="score_from is 'lengths', expected None or 'weights'"):
        TableOptions(policy=custom, score_from="lengths")  # type: ignore[arg-type]
    message = "score_from is 'weights', but the policy has scores ('none',), none of which is given"
    with pytest.raises(ValueError, match=re.escape(message)):
        TableOptions(score_from="weights")
    with pytest.raises(TypeError, match="record_evicted is 1, expected True or False"):
        TableOptions(record_evicted=1)  # type: ignore[arg-type]
