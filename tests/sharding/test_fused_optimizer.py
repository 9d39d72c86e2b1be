"""The fused optimizer of sharded dynamic tables, as TorchRec's loops use one."""

from __future__ import annotations

import pytest
import torch
from fused_optimizer_calls import (
    OF_ALL_SHARDINGS,
    accumulated,
    clipped,
    clipping_refused,
    clocks,
    forgotten,
    learning_rates,
    names,
    reads,
    saved_and_loaded,
    scaling_refused,
    untrained,
)
from ranks import Ranks

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

ROWS, WHOLE = "bags.embedding_bags.rows.weight", "bags.embedding_bags.whole.weight"


def test_parameters(two_ranks: Ranks) -> None:
    for rank, shown in enumerate(two_ranks.run(names)):
        fused = [ROWS, WHOLE] if rank == 1 else [ROWS]  # where the second table is
        assert shown["fused"] == fused
        assert shown["combined"] == sorted(
            [*(f"fused.{name}" for name in fused), "dense.over.bias", "dense.over.weight"]
        )
        assert shown["dense"] == ["over.weight", "over.bias"]
        assert shown["in_backward"] == [ROWS, WHOLE]
        assert "lr" in shown["param_groups"]


@pytest.mark.parametrize("kind", ["torch", "torchrec", "parameters"])
def test_learning_rates_reach_the_tables(two_ranks: Ranks, kind: str) -> None:
    for seen in two_ranks.run(learning_rates, kind):
        assert seen == [({0.1}, True), ({0.05}, True), ({0.0}, False)]


def test_param_groups_are_saved_where_wanted(two_ranks: Ranks) -> None:
    for found in two_ranks.run(saved_and_loaded):
        assert found == {
            "plain": ["state"],
            "saved": ["param_groups", "state"],
            "changed": {0.75},
            "loaded": {0.25},
        }


def test_tables_that_are_not_trained_stay_as_they_are_loaded(two_ranks: Ranks) -> None:
    results = two_ranks.run(untrained)
    for found in results:
        assert found["ids"] > 0
        assert (found["loaded"], found["untrained"], found["states"]) == (True, True, ["whole"])
    assert results[1]["trained"]  # where the trained table is


def test_clock_of_policies(two_ranks: Ranks) -> None:
    for ends in ("the optimizer", "those of parameters", "the next forward"):
        scores: dict[int, int] = {}
        for of_rank in two_ranks.run(clocks, ends):
            scores |= of_rank
        first = scores[0]
        assert scores == {id: first + id for id in range(6)} | {100: first + 5}


def test_evaluation_inserts_nothing(two_ranks: Ranks) -> None:
    for trained, evaluated in two_ranks.run(reads):
        assert trained == evaluated > 0


@pytest.mark.parametrize("split", [True, False], ids=["split", "one backward"])
def test_micro_batches_are_one_batch(two_ranks: Ranks, split: bool) -> None:
    """In split mode, or where one backward reaches all their lookups."""
    in_parts = two_ranks.run(accumulated, split, not split)
    at_once = two_ranks.run(accumulated, False)
    for one, other in zip(in_parts, at_once, strict=True):
        assert one.keys() == other.keys()
        assert sum(name.endswith(".weight_id") for name in one) == len(OF_ALL_SHARDINGS)
        for name, tensors in one.items():
            assert len(tensors) == len(other[name])
            for x, y in zip(tensors, other[name], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_gradients_of_split_mode_wait_for_the_step(two_ranks: Ranks) -> None:
    for after_backward, after_zero_grad, after_step in two_ranks.run(forgotten):
        assert after_backward
        assert after_zero_grad
        assert not after_step


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_one_norm_over_the_gradients_of_all_ranks(two_ranks: Ranks, norm_type: float) -> None:
    results = two_ranks.run(clipped, norm_type)
    for norm, before, after in results:
        assert norm == results[0][0]
        assert norm == pytest.approx(before, rel=1e-5)
        assert norm > 0.5
        assert after == pytest.approx(0.5, rel=1e-4)


def test_gradients_that_are_gone_cannot_be_clipped(two_ranks: Ranks) -> None:
    for traceback in two_ranks.errors(clipping_refused):
        assert "Collection updates its rows in backward, so their gradients are gone" in traceback


def test_scaled_losses_are_refused_because_a_rank_sees_its_own_infinities(two_ranks: Ranks) -> None:
    assert two_ranks.run(scaling_refused) == [True, True]
