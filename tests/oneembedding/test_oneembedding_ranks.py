"""Embeddings over two ranks against one process, and snapshots from one to the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from embedding_ranks import (
    Rows,
    capacities,
    load_state,
    loaded,
    one_path,
    other_optimizer,
    other_seed,
    states,
    trained,
    wrong_input,
)
from ranks import Ranks

from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("several processes over gloo")


def together(of_ranks: list[Rows]) -> Rows:
    """What the ranks have, each id on one of them: the one that owns it."""
    found: Rows = {}
    for rank, rows in enumerate(of_ranks):
        assert not found.keys() & rows.keys()
        owned = torch.tensor([id for _, id in rows])
        assert (ops.id_owners(owned, parts=len(of_ranks), slots=65536) == rank).all()
        found |= rows
    return found


def check_same(given: Rows, expected: Rows, tolerance: float = 1e-5) -> None:
    assert given.keys() == expected.keys()
    for key, row in expected.items():
        torch.testing.assert_close(given[key], row, rtol=tolerance, atol=tolerance)


def test_snapshots_load_on_another_number_of_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    trained(0, 1, one)
    two_ranks.run(trained, 2, two)
    results = [loaded(0, 1, path) for path in (one, two)]
    for path in (one, two):
        of_ranks = two_ranks.run(loaded, 2, path)
        before, after = (together([of_rank[k] for of_rank in of_ranks]) for k in (1, 2))
        results.append((None, before, after))
    for _, before, after in results[1:]:
        check_same(before, results[0][1])
        check_same(after, results[0][2], tolerance=1e-4)
    assert sorted(path.name for path in two.iterdir()) == ["snapshots"]


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (other_seed, "MultiTableMultiColumnEmbedding: seed differs between ranks: 0 on rank 0"),
        (other_optimizer, "Optimizer: optimizer.lr differs between ranks: 0.1 on rank 0"),
    ],
)
def test_ranks_that_differ_all_raise(two_ranks: Ranks, function: object, error: str) -> None:
    for traceback in two_ranks.errors(function):
        assert error in traceback


def test_all_ranks_refuse_the_wrong_ids_of_one(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(wrong_input)
    assert first == second
    assert len(first) == 8
    for call, name in enumerate(["", ".prefetch"]):
        owner = f": rank 1: MultiTableMultiColumnEmbedding{name}: "
        kinds = [text.split(owner)[0] for text in first[call::2]]
        assert kinds == ["TypeError", "ValueError", "ValueError", "ValueError"]


def test_paths_are_one_for_each_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    for traceback in two_ranks.errors(one_path, str(tmp_path)):
        assert "persistent_path has 1 paths, but there are 2 ranks" in traceback


def test_the_capacity_is_that_of_all_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.run(capacities) == [[500] * 3] * 2
    assert capacities(0) == [1000] * 3


def test_a_state_dict_is_each_rank_s_own(two_ranks: Ranks) -> None:
    of_ranks = two_ranks.run(states)
    for rank, traceback in enumerate(two_ranks.errors(load_state, of_ranks)):
        assert f"the state is of rank_{1 - rank}_of_2, expected rank_{rank}_of_2" in traceback
