"""Delta logs of RecIS's engines on two ranks, with rows of 8 bits and ids that wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_content import same
from engine_checkpoints import Trained, contents
from ranks import Ranks
from redis_server import running_server
from table_content import Content, content, merged

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("several processes over gloo")


def publish_engine(rank: int, path: Path) -> tuple[list[Content], list[Content]]:
    """What a rank of an engine has at each commit, and one that follows."""
    trained = Trained(rank, 2)
    trained.train(range(1))
    log = td.delta_log.DeltaLog(path, optimizer_state=True)
    log.attach(trained.engine)
    other = Trained(rank, 2, seed=8, filled=False)
    td.checkpoint.load(path / "base", other.engine)
    follower = td.delta_log.follow(path, other.engine)
    published, followed = [], []
    for step in range(1, 4):
        trained.train(range(step, step + 1))
        log.publish()
        log.flush()
        assert follower.update() == 1
        published.append(content(trained.engine))
        followed.append(content(other.engine))
    log.close()
    return published, followed


def test_an_engine_follows_another_one(two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(publish_engine, tmp_path / "log")
    for published, followed in found:
        assert followed == published
        assert published[0] != published[-1]
    alone = Trained(0, 1, seed=8, filled=False)
    assert td.delta_log.replay(tmp_path / "log", alone.engine) == 3
    ids = {key for published, _ in found for key in published[-1]}
    assert content(alone.engine).keys() == ids
    assert merged([content(alone.engine, state=False)]).keys() == ids


def publish_to_redis(rank: int, url: str, base: Path) -> Content:
    """What a rank of an engine has that publishes to a stream of its own."""
    trained = Trained(rank, 2)
    trained.train(range(1))
    td.checkpoint.save(base, trained.engine)
    log = td.delta_log.DeltaLog(td.delta_log.RedisSink(url, f"log:{rank}"))
    log.attach(trained.engine, base=base)
    trained.train(range(1, 2))
    log.publish()
    log.close()
    return content(trained.engine, state=False)


def test_an_engine_publishes_to_redis(two_ranks: Ranks, tmp_path: Path) -> None:
    with running_server() as server:
        published = merged(two_ranks.run(publish_to_redis, server.url, tmp_path / "base"))
        sinks = [td.delta_log.RedisSink(server.url, f"log:{rank}") for rank in range(2)]
        alone = Trained(0, 1, seed=8, filled=False)
        assert td.delta_log.replay(sinks, alone.engine, base=tmp_path / "base") == 1
        assert merged([content(alone.engine, state=False)]) == published
        rows = td.delta_log.RedisRows(server.url, "rows")
        with pytest.raises(ValueError, match="has trained rows of 8 bits with a scale"):
            rows.follow(sinks, base=tmp_path / "base")  # rows by id are of plain floats


def publish_to_resume(rank: int, path: Path, whole: Path) -> None:
    """Train an engine that goes on from a log once, then save it."""
    for steps in (range(2), range(2, 4)):
        trained = Trained(rank, 2, filled=steps.start == 0)
        with td.delta_log.DeltaLog(path, resume=True) as log:
            td.delta_log.resume(log, trained.engine)
            for step in steps:
                trained.train(range(step, step + 1))
                log.publish(state={"step": step})
    td.checkpoint.save(whole, trained.engine)


def resume_engine(rank: int, size: int, path: Path, whole: Path) -> bool:
    """Whether an engine that resumes has what one has that loads the checkpoint."""
    resumed, loaded = (Trained(rank, size, seed=seed, filled=False) for seed in (7, 8))
    assert td.delta_log.resume(path, resumed.engine).state == {"step": 3}
    td.checkpoint.load(whole, loaded.engine)
    found = [contents(of.engine) for of in (resumed, loaded)]
    for child in (child for of in found for child in of.values()):
        for values in child.values.values():
            del values["rows"]  # 8-bit rows may be NaN as floats; content() compares bits
    return content(resumed.engine) == content(loaded.engine) and same(*found)


@pytest.mark.long
def test_an_engine_resumes_on_any_number_of_ranks(
    two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path
) -> None:
    paths = tmp_path / "log", tmp_path / "whole"
    two_ranks.run(publish_to_resume, *paths)
    for ranks in (two_ranks, three_ranks):
        assert all(ranks.run(resume_engine, ranks.world_size, *paths))
    assert resume_engine(0, 1, *paths)
