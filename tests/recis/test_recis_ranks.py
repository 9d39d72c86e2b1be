"""Lookups over two ranks against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_engines import frozen_engine, kept_ids
from rank_steps import (
    dense_parameters_too,
    different_options,
    features,
    inserted,
    one_group_each,
    one_norm,
    other_group_refused,
    saved_and_loaded,
    scored,
    times,
    trained,
    wrong_input,
)
from ranks import Ranks

from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("several processes over gloo")

HALVES = [[range(6), range(6, 12)] for _ in range(3)]


def whole(parts: list[list[range]]) -> list[list[range]]:
    return [[range(sum(len(p) for p in part))] for part in parts]


def check_same(alone: Any, ranks: list[Any], parts: list[list[range]]) -> None:
    outputs, content = alone
    for step, samples in enumerate(parts):
        for name, expected in outputs[step].items():
            given = torch.cat([ranks[r][0][step][name] for r in range(len(samples))])
            torch.testing.assert_close(
                given, expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    for child, (ids, rows) in content.items():
        found = {i: row for r in ranks for i, row in zip(*r[1][child], strict=True)}
        assert sum(len(r[1][child][0]) for r in ranks) == len(found) == len(ids)
        torch.testing.assert_close(torch.stack([found[i] for i in ids]), rows, rtol=1e-4, atol=1e-5)
        for rank, (_, of_rank) in enumerate(ranks):
            owned = torch.tensor(of_rank[child][0], dtype=torch.int64)
            assert (ops.id_owners(owned, parts=len(ranks)) == rank).all()


def test_several_lookups_of_a_step_are_one_update(two_ranks: Ranks) -> None:
    names = ["clicked", "candidate", "history", "user", "wide"]
    alone = trained(0, 1, whole(HALVES), names=names)
    ranks = two_ranks.run(trained, 2, HALVES, "worker", False, names, 3)
    check_same(alone, ranks, HALVES)


def rows_of_a_generator(rank: int) -> torch.Tensor:
    """Rows of ids 0 to 3, which lie on two ranks with different generators."""
    from lookups import option

    from torch_dynemb.recis import DynamicEmbedding, NormalInitializer

    initializer = NormalInitializer(generator=torch.Generator().manual_seed(7 + rank))
    module = DynamicEmbedding(option(initializer=initializer))
    return module(torch.arange(4)[:, None]).detach()


def test_the_first_rank_s_generator_counts(two_ranks: Ranks) -> None:
    expected = rows_of_a_generator(0)
    assert not torch.equal(rows_of_a_generator(1), expected)
    for rows in two_ranks.run(rows_of_a_generator):
        assert torch.equal(rows, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("grad_reduce_by", "names"),
    [("worker", ["clicked", "candidate"]), ("id", None)],
)
def test_compiled_lookups_over_ranks(
    two_ranks: Ranks, grad_reduce_by: str, names: list[str] | None
) -> None:
    parts = HALVES[:2]
    eager = two_ranks.run(trained, 2, parts, grad_reduce_by, False, names)
    compiled = two_ranks.run(trained, 2, parts, grad_reduce_by, True, names)
    for one, other in zip(eager, compiled, strict=True):
        for step in range(2):
            for name, expected in one[0][step].items():
                torch.testing.assert_close(other[0][step][name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_ranks_agree_on_the_time(two_ranks: Ranks, compiled: bool) -> None:
    """The latest clock counts: that of rank 1, which is ahead, until the fast one overtakes it."""
    ranks = two_ranks.run(times, [1000, 1700], [600, 1], None, compiled)
    by_step = [1000, 1700, 1701, 2200]  # what rank 0 began with, then what steps have read
    for of_rank in ranks:
        assert [now for now, _ in of_rank] == by_step
        for step, (now, scores) in enumerate(of_rank):
            seen = {*range(3 * step, 3 * step + 7)} & scores.keys()
            assert seen
            assert {scores[id] for id in seen} == {now}


def test_a_time_that_all_ranks_give(two_ranks: Ranks) -> None:
    for of_rank in two_ranks.run(times, [1000, 1700], [600, 1], [7, 8, 9, 10], False):
        assert [now for now, _ in of_rank] == [1000, 7, 8, 9]


def test_a_given_group_is_the_one_that_counts(two_ranks: Ranks) -> None:
    expected, _ = trained(0, 1, [[range(4)]])
    for outputs, alone in two_ranks.run(one_group_each, range(4)):
        assert alone["alone"].shape == (1, 4)
        for name in features():
            assert torch.equal(outputs[name], expected[0][name])


def test_a_group_without_this_process_is_refused(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(other_group_refused)
    assert first == ""
    assert "does not have this process as a member" in second


@pytest.mark.parametrize("combine", ["last", "max", "sum", "decayed_sum"])
def test_scores_travel_with_the_ids(two_ranks: Ranks, combine: str) -> None:
    parts = [[range(6), range(6, 12)], [range(12), range(0)], [range(5), range(5, 12)]]
    alone = scored(0, combine, whole(parts))
    first, second = two_ranks.run(scored, combine, parts)
    assert len(first) > 5
    assert len(second) > 5
    assert first | second == (alone if combine != "decayed_sum" else pytest.approx(alone, rel=1e-6))


def test_ranks_with_different_options_all_raise(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(different_options)
    assert first == second
    assert first == {
        "initializer": "DynamicEmbedding: table 'item': initializer differs between ranks: "
        "Normal(mean=0.0, std=0.1) on rank 0; Normal(mean=0.0, std=0.2) on rank 1: the ranks share "
        "the tables, so give all of them the same",
        "order": "EmbeddingEngine: names of emb_options differs between ranks: ['clicked', 'user'] "
        "on rank 0; ['user', 'clicked'] on rank 1: the ranks share the tables, so give all of them "
        "the same",
        "hook": "EmbeddingEngine: table 'item': admit_hook differs between ranks: "
        "AdmitHook(name='Frequency', params={'threshold': 2}) on rank 0; "
        "AdmitHook(name='Frequency', params={'threshold': 3}) on rank 1: the ranks share the "
        "tables, so give all of them the same",
        "lr": "SparseAdam: optimizer.lr differs between ranks: 0.1 on rank 0; 0.2 on rank 1: the "
        "ranks share the tables, so give all of them the same",
        "sizes": "",
    }


INPUT_REFUSES = {
    "no dict": "TypeError: {}EmbeddingEngine: input_features is [], expected a dict of ids by fea",
    "missing": "KeyError: {}EmbeddingEngine: input_features lacks ['clicked', 'candidate', ",
    "floats": "TypeError: {}EmbeddingEngine: feature 'wide': input has dtype torch.float32, exp",
    "a list": "TypeError: {}EmbeddingEngine: feature 'candidate' is a list, expected a Tensor or",
    "one: floats": "TypeError: {}DynamicEmbedding 'one': input_ids: input has dtype torch.float32",
    "one: weights": "ValueError: {}DynamicEmbedding 'one': input_ids: weights has shape (2,), exp",
    "one: a list": "TypeError: {}DynamicEmbedding 'one': input_ids is a list, expected a Tensor ",
}


def test_all_ranks_refuse_the_wrong_input_of_one(two_ranks: Ranks) -> None:
    for found in two_ranks.run(wrong_input, [range(6), range(6, 12)]):
        assert found.keys() == INPUT_REFUSES.keys()
        for name, message in INPUT_REFUSES.items():
            assert found[name].startswith(message.format("rank 1: ")), (name, found[name])


def test_states_belong_to_their_rank(two_ranks: Ranks) -> None:
    for messages in two_ranks.run(saved_and_loaded, [range(6), range(6, 12)]):
        assert len(messages) == 1
        assert "load each rank's own, or use torch_dynemb.checkpoint" in messages[0]


def test_one_norm_over_the_rows_of_all_ranks(two_ranks: Ranks) -> None:
    (norm, expected), other = two_ranks.run(one_norm)
    assert other == (norm, expected)
    assert norm == pytest.approx(expected, rel=1e-5)
    assert norm > 0


def test_the_dense_part_in_ddp(two_ranks: Ranks) -> None:
    ranks = two_ranks.run(dense_parameters_too)
    assert sorted(ranks[0]["ids"] + ranks[1]["ids"]) == [0, 1, 2, 3, 4]


def test_frozen_engines_of_the_first_rank_or_of_each(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(frozen_engine, "first")
    assert second[1] is None
    assert first[3] == {name: size + second[2][name] for name, size in first[2].items()}
    for live, frozen, own, of_copy in two_ranks.run(frozen_engine, "own"):
        assert of_copy == own
        # rows of "user" are summed, and those of ids that others have are zeros
        assert frozen is not None
        assert not torch.equal(frozen["user"], live["user"])


@pytest.mark.long
def test_copies_and_followers_have_the_kept_ids(two_ranks: Ranks, tmp_path: Path) -> None:
    (copied, first), (other, second) = two_ranks.run(kept_ids, tmp_path / "log")
    assert copied == other == sorted(first + second) == [4, 8, 9, 10, 11]


def test_rows_are_inserted_at_their_owners(two_ranks: Ranks) -> None:
    results = two_ranks.run(inserted, 2)
    expected = {i - 9: [4.0 * i + c for c in range(4)] for i in range(18)}
    found = {id_: row for result in results for id_, row in result["rows"].items()}
    assert found == expected
    for rank, result in enumerate(results):
        assert result["counted"] == [[*row, 1.0] for row in result["rows"].values()]
        owners = ops.id_owners(torch.tensor(result["owned"]), parts=2)
        assert (owners == rank).all()
        assert result["gradients"] == [0.5]  # of one rank, divided by the number of ranks
        assert "shape" in result["errors"]["shape"]
        assert "ids of all ranks have 1 repeated ids" in result["errors"]["twice"]
        assert "feature is 'nothing'" in result["errors"]["name"]
        assert "user" in result["errors"]["other"]
    assert sorted(i for result in results for i in result["owned"]) == list(range(-9, 9))
