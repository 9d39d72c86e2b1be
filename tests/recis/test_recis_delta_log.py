"""Delta logs of RecIS's engines on two ranks, with rows of 8 bits and ids that wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_checkpoints import Trained
from ranks import Ranks
from table_content import Content, content, merged

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("several processes over gloo")


def publish_engine(rank: int, path: Path) -> tuple[list[Content], list[Content]]:
    """What a rank of an engine has at each commit, and one that follows."""
    trained = Trained(rank, 2)
    trained.train(range(1))
    log = td.checkpoint.DeltaLog(path, optimizer_state=True)
    log.attach(trained.engine)
    other = Trained(rank, 2, seed=8, filled=False)
    td.checkpoint.load(path / "base", other.engine)
    follower = td.checkpoint.follow(path, other.engine)
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
    assert td.checkpoint.replay(tmp_path / "log", alone.engine) == 3
    ids = {key for published, _ in found for key in published[-1]}
    assert content(alone.engine).keys() == ids
    assert merged([content(alone.engine, state=False)]).keys() == ids
