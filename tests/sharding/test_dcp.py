"""torch.distributed.checkpoint with dynamic tables: memory, rows read by each rank, async_save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dcp_steps import (
    async_save,
    load_by_planners_of_others,
    load_large,
    load_unfit,
    rows_read,
    save_with_stager_of_torch,
)
from ranks import Ranks
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

import torch_dynemb as td
from torch_dynemb.torchrec.state.load_planner import rows_by_rank

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


@pytest.mark.long
@pytest.mark.parametrize("stays", [True, False], ids=["stays", "moves"])
@pytest.mark.parametrize("policy", [td.Policy(), td.Policy(score="frequency")], ids=["", "scores"])
def test_a_load_takes_little_memory_beside_the_state_dict(
    two_ranks: Ranks, policy: td.Policy, stays: bool
) -> None:
    """Where rows move, their ids are sorted first, which takes the most of it.

    What a rank has sent is freed when the other one has taken it, which a busy machine puts off; so
    the least of several loads counts.
    """
    loads = [two_ranks.run(load_large, 100_000, policy, stays) for _ in range(4)]
    for of_rank in zip(*loads, strict=True):
        assert all(whole for _, _, whole in of_rank)
        assert all(table > 20_000_000 for table, _, _ in of_rank)
        assert min(most / table for table, most, _ in of_rank) < (0.1 if stays else 0.3)


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise"])
def test_ranks_read_what_they_own(two_ranks: Ranks, tmp_path: Path, sharding: str) -> None:
    found = two_ranks.run(rows_read, str(tmp_path), sharding)
    assert all(read == has for read, has in found)
    assert sum(has for _, has in found) > 20


def test_planners_of_others_read_all_rows(two_ranks: Ranks, tmp_path: Path) -> None:
    for of_rank in two_ranks.run(load_by_planners_of_others, str(tmp_path)):
        assert of_rank == [[], []]


def test_rows_that_a_rank_reads_end_where_saved_pieces_do() -> None:
    def entry(*sizes: int) -> TensorStorageMetadata:
        begins = [sum(sizes[:k]) for k in range(len(sizes))]
        chunks = [
            ChunkStorageMetadata(torch.Size([begin, 0]), torch.Size([size, 2]))
            for begin, size in zip(begins, sizes, strict=True)
        ]
        return TensorStorageMetadata(TensorProperties(), torch.Size([sum(sizes), 2]), chunks)

    assert rows_by_rank(entry(60, 40), [1, 0], 2) == [range(60, 100), range(60)]  # the owners'
    assert rows_by_rank(entry(60, 40), [1], 2) == [range(0), range(100)]
    assert rows_by_rank(entry(24, 27, 26, 23), [], 2) == [range(51), range(51, 100)]  # whole pieces
    assert rows_by_rank(entry(24, 27, 26, 23), [0, 1], 2) == [range(51), range(51, 100)]
    assert rows_by_rank(entry(90, 10), [], 2) == [range(50), range(50, 100)]  # none ends near
    assert rows_by_rank(entry(100), [0, 1], 2) == [range(50), range(50, 100)]
    assert rows_by_rank(entry(0), [0, 1], 2) == [range(0), range(0)]


def test_ids_that_a_table_cannot_have_are_refused_before_a_change(two_ranks: Ranks) -> None:
    for result in two_ranks.run(load_unfit):
        error, changed = result["capacity"]
        assert "table 'ads' was saved with " in error
        assert " ids for this part, but has room for " in error
        assert "give it a larger capacity" in error
        assert not changed
        error, changed = result["padding"]
        assert (
            "'ads' was saved with a row for id 7, which is the padding id of the model's" in error
        )
        assert not changed


def test_an_asynchronous_save_holds_the_values_of_the_cut(two_ranks: Ranks, tmp_path: Path) -> None:
    results = two_ranks.run(async_save, str(tmp_path))
    assert [differing for differing, _ in results] == [[], []]
    changed = {name for _, names in results for name in names}
    assert {f"bags.embedding_bags.{table}.weight" for table in ("ads", "fixed")} <= changed


def test_the_stager_of_torch_is_refused_by_name(two_ranks: Ranks, tmp_path: Path) -> None:
    for error in two_ranks.run(save_with_stager_of_torch, str(tmp_path)):
        assert "give async_save async_stager=torch_dynemb.torchrec.Stager()" in error
