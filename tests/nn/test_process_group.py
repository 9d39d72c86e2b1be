"""Modules with ``process_group=``: ranks share rows, and do what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from shared_row_steps import Model, content, refused, saved, unnamed_and_limited
from wrong_input_steps import apart, many_features
from wrong_input_steps import refused as refused_input

import torch_dynemb as td
from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("several processes over gloo")


def merged(results: list[dict[str, Any]]) -> list[dict[int, list[float]]]:
    """Rows of all ranks by table; each id is on the rank that owns it."""
    for rank, of in enumerate(results):
        for rows in of["content"]:
            ids = torch.tensor(list(rows), dtype=torch.int64)
            assert bool((ops.id_owners(ids, parts=len(results)) == rank).all())
            assert len(ids) > 0
    tables = zip(*(of["content"] for of in results), strict=True)
    return [{id: row for rows in parts for id, row in rows.items()} for parts in tables]


def test_states_checkpoints_and_frozen_copies(two_ranks: Ranks, tmp_path: Path) -> None:
    results = two_ranks.run(saved, str(tmp_path))
    for rank, of in enumerate(results):
        assert of["loaded"]
        assert of["frozen"]
        assert f"is of rank_{1 - rank}_of_2, expected rank_{rank}_of_2: load each" in of["error"]
        assert "items: the state is of rank_0_of_2, expected one process" in of["alone"]
    model = Model(None)
    td.checkpoint.load(tmp_path / "saved", model)
    assert content(model) == merged(results)


def test_what_is_refused(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(refused)
    for of in (first, second):
        assert of["type"].startswith("TypeError: DynamicEmbedding: process_group is 'world'")
        assert "keeps custom scores" in of["custom"]
        assert "initializer" in of["differs"]
        assert "optimizer" in of["lr"]
        assert "do not send them" in of["scores"]
        assert "ranks share" in of["averaged"]
    assert "process_group lacks this process (rank 1)" in second["member"]


def test_unnamed_tables_capacities_and_norms(two_ranks: Ranks) -> None:
    results = two_ranks.run(unnamed_and_limited)
    assert torch.equal(results[0]["read"], results[1]["read"])
    assert sorted(results[0]["ids"] + results[1]["ids"]) == list(range(20))
    assert [of["capacity"] for of in results] == [50, 50]
    # 20 rows with a gradient of 1 / 2 for each of 4 columns
    assert [of["norm"] for of in results] == pytest.approx([(20 * 4 / 4) ** 0.5] * 2)
    assert all(of["twin"] for of in results)


INPUT_REFUSES = {
    "floats": "TypeError: {}DynamicEmbedding: input has dtype torch.float32, expected int64 or",
    "a list": "TypeError: {}DynamicEmbedding: input is a list, expected a Tensor of ids",
    "no offsets": "ValueError: {}DynamicEmbeddingBag: offsets is None, expected where each bag",
    "float offsets": "TypeError: {}DynamicEmbeddingBag: offsets has dtype torch.float32, expected",
    "decreasing": "RuntimeError: {}offsets[2] is 2, less than offsets[1] = 4: offsets must not ",
    "from 1": "RuntimeError: {}offsets are from 1 to 6, expected 0 to 6, the number of ids: ",
    "past the end": "RuntimeError: {}offsets[3] is 6, less than offsets[2] = 7: offsets must not",
    "few weights": "ValueError: {}DynamicEmbeddingBag: per_sample_weights has shape (5,), expected",
    "missing": "KeyError: {}DynamicEmbeddingBagCollection: features lacks ['friend', 'ad']; it has",
    "other sizes": "ValueError: {}DynamicEmbeddingBagCollection: feature 'ad' has 2 bags, but",
    "float feature": "TypeError: {}DynamicEmbeddingBagCollection: feature 'ad': input has dtype ",
    "jagged": "RuntimeError: {}offsets[4], of feature 'friend', is 2, less than offsets[3] = 3: ",
    "missing rows": "KeyError: {}DynamicEmbeddingCollection: features lacks ['b']; it has ['a']",
    "float rows": "TypeError: {}DynamicEmbeddingCollection: feature 'b': input has dtype torch.fl",
    "no dict": "TypeError: {}DynamicEmbeddingCollection: features is a Tensor, expected a dict of",
    "jagged rows": "RuntimeError: {}offsets are from 0 to 7, expected 0 to 6, the number of ids: ",
    "scores": "ValueError: {}DynamicEmbedding: scores are given, but lookups of a table with proce",
    "in evaluation": "TypeError: {}DynamicEmbedding: input has dtype torch.float32, expected int64",
}


def test_all_ranks_refuse_the_wrong_input_of_one(two_ranks: Ranks) -> None:
    for found in two_ranks.run(refused_input):
        assert found.keys() == INPUT_REFUSES.keys()
        for name, message in INPUT_REFUSES.items():
            assert found[name].startswith(message.format("rank 1: ")), (name, found[name])


ORDER = {
    "order": "table 'user', but rank 1 begins a training lookup of table 'item': look up the same",
    "features": "'user', but rank 1 begins a training lookup of tables 'a', 'b', 'c' and 1 more: ",
    "unnamed": "rank 1 begins a training lookup of table 'embedding' (of seed ",
    "frozen": "a training lookup of table 'frozen', but rank 1 begins a lookup of table 'frozen': ",
    "eval": "a training lookup of table 'user', but rank 1 begins a lookup of table 'user': ",
}


def test_all_ranks_refuse_lookups_in_another_order(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(apart)
    assert first == second
    assert first.keys() == ORDER.keys()
    for name, message in ORDER.items():
        assert first[name].startswith("RuntimeError: rank 0 begins a training lookup of table"), (
            name
        )
        assert message in first[name], (name, first[name])


def test_more_features_than_the_first_message_holds(two_ranks: Ranks) -> None:
    results = two_ranks.run(many_features)
    for t in range(70):
        name = f"t{t}"
        lengths = [t % 3 + rank for rank in range(2)]
        assert sum(of["sizes"][name] for of in results) == max(lengths)
        for of, length in zip(results, lengths, strict=True):
            assert torch.equal(of["trained"][name], torch.full((length, 2), float(t)))
            # each rank has a gradient of 1 for its ids; their mean counts for both
            both = [(id < lengths[0]) + (id < lengths[1]) for id in range(length)]
            moved = torch.tensor(both, dtype=torch.float32)[:, None].expand(length, 2) / 2
            assert torch.equal(of["read"][name], t - moved)
