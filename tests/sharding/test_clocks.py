"""Ranks with different clocks agree on the time of an id, and drop the same ids."""

from __future__ import annotations

import pytest
import torch
from clock_steps import STARTS, STEPS, Shard, pipelined, trained
from ranks import Ranks
from sharded_models import SEQUENCE_SHARDINGS, Table

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

BAGS = tuple(
    Table(sharding, 16, (sharding,), "mean", sharding)
    for sharding in ("table_wise", "row_wise", "column_wise", "table_column_wise")
)
SEQUENCES = tuple(
    Table(f"each_{sharding}", 8, (f"each_{sharding}",), "none", sharding)
    for sharding in SEQUENCE_SHARDINGS
)
OVER_NODES = tuple(
    Table(sharding, 16, (sharding,), "sum", sharding)
    for sharding in ("table_row_wise", "grid_shard")
)


def check_shards(of_ranks: list[list[Shard]]) -> dict[str, list[list[Shard]]]:
    """All shards of a table know one time, and those of other columns of an id the same scores.

    Returns:
        By table the shards of each rank that has some.
    """
    tables: dict[str, list[list[Shard]]] = {}
    for of_rank in of_ranks:
        for name in sorted({shard.table for shard in of_rank}):
            shards = [shard for shard in of_rank if shard.table == name]
            tables.setdefault(name, []).append(shards)
    for name, ranks in tables.items():
        shards = [shard for of_rank in ranks for shard in of_rank]
        times = shards[0].now
        assert times == sorted(times), name
        assert len(set(times)) > 1, name
        by_columns: dict[int, dict[int, list[int]]] = {}
        for shard in shards:
            assert shard.now == times, name
            found = by_columns.setdefault(shard.first_column, {})
            found.update(zip(shard.ids.tolist(), shard.scores.tolist(), strict=True))
        first, *others = by_columns.values()
        assert first, name
        assert all(other == first for other in others), name
    return tables


@pytest.mark.parametrize("ends_steps", [True, False])
@pytest.mark.parametrize("kind", ["plain", "int32"])
def test_ranks_agree_on_the_time(two_ranks: Ranks, kind: str, ends_steps: bool) -> None:
    of_ranks = two_ranks.run(trained, BAGS + SEQUENCES, kind, None, ends_steps)
    tables = check_shards(of_ranks)
    assert len(tables) == len(BAGS + SEQUENCES)
    for name in ("column_wise", "table_column_wise", "each_column_wise"):
        of_columns = {shard.first_column for shards in tables[name] for shard in shards}
        assert len(of_columns) == 2
    if not ends_steps:
        return
    for shards in tables.values():
        # the latest of what ranks propose, and that is not always the same rank's
        proposals = [shard.proposed for of_rank in shards for shard in of_rank]
        latest = [max(of_step) for of_step in zip(*proposals, strict=True)]
        assert shards[0][0].now[1:] == latest[:-1]


@pytest.mark.parametrize("kind", ["vbe", "variable_batch", "empty_rank"])
def test_batches_of_several_sizes_bring_the_time_along(two_ranks: Ranks, kind: str) -> None:
    check_shards(two_ranks.run(trained, BAGS, kind, None, True))


@pytest.mark.long
def test_ranks_of_several_nodes_agree(four_ranks: Ranks) -> None:
    of_ranks = four_ranks.run(trained, OVER_NODES, "plain", None, True)
    tables = check_shards(of_ranks)
    assert len({shard.first_column for of in tables["grid_shard"] for shard in of}) == 2


def test_a_pipeline_that_sends_ids_early(two_ranks: Ranks) -> None:
    check_shards(two_ranks.run(pipelined, BAGS))


def test_a_time_that_all_ranks_give(two_ranks: Ranks) -> None:
    of_ranks = two_ranks.run(trained, BAGS, "plain", 5, True)
    for of_rank in of_ranks:
        for shard in of_rank:
            begin, *given = shard.now
            assert begin == STARTS[0]  # what the clock of the first rank said
            assert given == [5 + 10 * step for step in range(1, STEPS)]
            assert torch.all(shard.scores[:, 1] <= begin)
