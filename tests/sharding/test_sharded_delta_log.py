"""Delta logs of sharded models: one per rank, with common commits."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_content import same, saved_content
from checkpoint_models import Kind, Unsharded, equal_shards, shards_of_unsharded
from delta_log_steps import (
    STEPS,
    Followed,
    fails_on_one_rank,
    publishes_and_follows,
    publishes_to_redis,
    publishes_to_resume,
    resumes,
)
from ranks import Ranks
from redis_server import running_server
from table_content import content, merged

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

KINDS = (
    Kind("rows", ("row_wise", "column_wise")),
    Kind("columns", ("column_wise", "table_wise")),
    Kind("whole", ("table_wise", "row_wise"), dtypes=("BF16", "BF16")),
    Kind("full", ("row_wise", "row_wise"), policy="evicting"),
    Kind("sequence", ("row_wise", "table_wise"), pooling="none"),
)
COMMITS = 3


def check(found: list[Followed]) -> None:
    for commit in range(len(found[0].published)):
        published = merged(of.published[commit] for of in found)
        assert {name for name, _ in published} >= {"bags.rows", "bags.columns", "bags.whole"}
        assert merged(of.followed[commit] for of in found) == published
    assert all(of.dense[0] == of.dense[1] for of in found)


def test_another_sharding_and_one_process_follow(two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(publishes_and_follows, KINDS, tmp_path / "log", COMMITS)
    check(found)
    alone = Unsharded(KINDS, 0, "adam")
    assert td.delta_log.replay(tmp_path / "log", alone) == COMMITS
    published = merged(of.published[-1] for of in found)
    assert merged([content(alone, state=False)]) == published
    assert [parameter.tolist() for parameter in alone.over.parameters()] == found[0].dense[0]
    (tmp_path / "log" / "r001-of-002").rename(tmp_path / "r001-of-002")
    follower = td.delta_log.follow(tmp_path / "log", Unsharded(KINDS, 0, "adam"))
    assert follower.update() == 0  # a commit is there when all ranks have it
    with pytest.raises(ValueError, match="has a log of 2 ranks, but the model has 1"):
        td.delta_log.DeltaLog(tmp_path / "log").attach(alone)


def test_ranks_publish_to_redis(two_ranks: Ranks, tmp_path: Path) -> None:
    base = tmp_path / "base"
    kinds = [kind for kind in KINDS if kind.name in ("rows", "columns", "sequence")]
    with running_server() as server:
        of_ranks = two_ranks.run(publishes_to_redis, kinds, server.url, base, COMMITS)
        sinks = [td.delta_log.RedisSink(server.url, f"clicks:{rank}") for rank in range(2)]
        alone, published = Unsharded(kinds, 0, "adam"), merged(of for (of,) in of_ranks)
        assert td.delta_log.replay(sinks, alone, base=base) == COMMITS
        assert merged([content(alone, state=False)]) == published
        rows = td.delta_log.RedisRows(server.url, "rows", shards=4)
        assert rows.follow(sinks, base=base).update() == COMMITS
        client = server.client()
        found = {
            (table, int(id)): list(struct.unpack_from(f"<{len(row) // 4 - 2}i", row, 8))
            for table in json.loads(client.hget("rows", "tables"))
            for shard in range(4)
            for id, row in client.hgetall(f"rows:{table}:{shard}").items()
            if id not in (b"position", b"writer")
        }
    assert found == published


def test_a_commit_that_one_rank_cannot_write_is_none(two_ranks: Ranks, tmp_path: Path) -> None:
    kinds = [kind for kind in KINDS if kind.name in ("rows", "columns", "whole")]
    found = two_ranks.run(fails_on_one_rank, kinds, tmp_path / "log")
    assert all("no room on this rank" in raised for raised, _, _ in found)
    assert all("rank 1 ends with commit 0, but others go on to 3" in lost for _, lost, _ in found)
    check([of for _, _, of in found])


RESUMED = (
    *KINDS,
    Kind("times", ("row_wise", "table_wise"), policy="times"),
    Kind("counted", ("table_wise", "row_wise"), policy="counted"),
    Kind("sketched", ("row_wise", "row_wise"), policy="sketched"),
)


# columns of three ranks would not be equally many
ON_THREE = [
    replace(kind, shardings=("row_wise", kind.shardings[1].replace("column", "row")))
    for kind in RESUMED
]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adam", "rowwise"])
def test_training_resumes_on_any_number_of_ranks(
    two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path, optimizer: str
) -> None:
    log, whole, other = (tmp_path / name for name in ("log", "whole", "other"))
    for steps in (range(2), range(2, 2), range(2, STEPS)):  # each time from where it was
        two_ranks.run(publishes_to_resume, RESUMED, optimizer, log, whole, steps)
    undisturbed = tmp_path / "undisturbed"
    two_ranks.run(publishes_to_resume, RESUMED, optimizer, undisturbed, other, range(STEPS))
    assert same(saved_content(whole), saved_content(other))
    for side in (0, 1):
        assert all(two_ranks.run(resumes, RESUMED, side, optimizer, log, whole))
    assert all(three_ranks.run(resumes, ON_THREE, 1, optimizer, log, whole))
    models = [Unsharded(RESUMED, 0, optimizer) for _ in range(2)]
    assert td.delta_log.resume(log, models[0]).state["step"] == STEPS
    td.checkpoint.load(whole, models[1])
    assert all(map(equal_shards, *[shards_of_unsharded(model) for model in models]))
    sink = td.delta_log.DirectorySink(log / "r001-of-002")
    sink.drop_after(STEPS - 1)  # as if this rank had been killed before it wrote
    sink.close()
    assert td.delta_log.resume(log, models[0]).state["step"] == STEPS - 1
    two_ranks.run(publishes_to_resume, RESUMED, optimizer, log, whole, range(STEPS - 1, STEPS))
    assert same(saved_content(whole), saved_content(other))
