"""What the ranks of test_sharded_delta_log do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from checkpoint_models import Kind, equal_shards, sharded_model, shards_of, train
from checkpoint_steps import names_of
from table_content import Content, content

import torch_dynemb as td
from torch_dynemb.delta_log import DeltaLog, NewBaseNeededError, RedisSink, follow


class Followed(NamedTuple):
    """What a rank has at each commit.

    Attributes:
        published: of the model that trains.
        followed: of the one that follows.
        dense: of both, at the end.
    """

    published: list[Content]
    followed: list[Content]
    dense: tuple[list[Any], list[Any]]


def _dense(model: Any) -> list[Any]:
    return [parameter.tolist() for parameter in model.module.over.parameters()]


def publishes_and_follows(rank: int, kinds: Sequence[Kind], path: Path, commits: int) -> Followed:
    """Trains in one sharding and publishes; another one follows."""
    model = sharded_model(kinds, 0, "adam")
    names = names_of(kinds)
    train(model, rank, names, range(2))
    log = DeltaLog(path, every_steps=2)
    log.attach(model)
    other = sharded_model(kinds, 1, "adam", seed=1)
    td.checkpoint.load(path / "base", other)
    follower = follow(path, other)
    published, followed = [], []
    for commit in range(commits):
        train(model, rank, names, range(2 + 2 * commit, 3 + 2 * commit))
        assert log.step() is None
        train(model, rank, names, range(3 + 2 * commit, 4 + 2 * commit))
        assert log.step() == commit + 1
        published.append(content(model, state=False))
        log.flush()
        assert follower.update() == 1
        followed.append(content(other, state=False))
    log.close()
    return Followed(published, followed, (_dense(model), _dense(other)))


def publishes_to_redis(
    rank: int, kinds: Sequence[Kind], url: str, base: Path, commits: int
) -> list[Content]:
    """Trains and publishes to a stream of this rank; returns what the rank has at the end."""
    model, names = sharded_model(kinds, 0, "adam"), names_of(kinds)
    train(model, rank, names, range(2))
    td.checkpoint.save(base, model)
    log = DeltaLog(RedisSink(url, f"clicks:{rank}"))
    log.attach(model, base=base)
    for commit in range(commits):
        train(model, rank, names, range(2 + commit, 3 + commit))
        assert log.publish() == commit + 1
    log.close()
    return [content(model, state=False)]


def fails_on_one_rank(rank: int, kinds: Sequence[Kind], path: Path) -> tuple[str, str, Followed]:
    """A commit that one of the ranks cannot write, and the next ones.

    It loses the answer of the second one, and of the third one, which the other rank cannot write.
    Then it loses its log.
    """
    model, other = sharded_model(kinds, 0, "adam"), sharded_model(kinds, 1, "adam", seed=1)
    train(model, rank, names_of(kinds), range(2))
    log = DeltaLog(path)
    log.attach(model)
    td.checkpoint.load(path / "base", other)
    follower = follow(path, other)
    train(model, rank, names_of(kinds), range(2, 3))
    append = log._own.sink.append

    def full(data: memoryview, sequence: int) -> None:
        raise OSError(28, "no room on this rank")

    if rank == 1:
        log._own.sink.append = full  # type: ignore[method-assign]
    assert log.publish() == 1
    try:
        log.flush()
        raised = "nothing"
    except OSError as error:
        raised = str(error)
    log._own.sink.append = append  # type: ignore[method-assign]
    assert follower.update() == 0
    train(model, rank, names_of(kinds), range(3, 4))
    dist.barrier()
    assert log.publish() == 1
    published = [content(model, state=False)]
    log.flush()
    assert follower.update() == 1
    followed = [content(other, state=False)]

    def unanswered(data: memoryview, sequence: int) -> None:
        append(data, sequence)
        raise OSError(5, "no answer on this rank")

    for commit, fate in ((2, unanswered if rank == 1 else append), (3, (full, unanswered)[rank])):
        log._own.sink.append = fate  # type: ignore[method-assign]
        train(model, rank, names_of(kinds), range(commit + 2, commit + 3))
        assert log.publish() == commit
        with suppress(OSError) if commit == 3 else nullcontext():
            log.flush()
        assert log.durable_sequence == log.sequence == 2
        dist.barrier()
        assert follower.update() == int(commit == 2)
        if commit == 2:
            published.append(content(model, state=False))
            followed.append(content(other, state=False))
    log._own.sink.append = append  # type: ignore[method-assign]
    assert log.publish() == 3
    published.append(content(model, state=False))
    log.close()
    assert follower.update() == 1
    followed.append(content(other, state=False))
    dist.barrier()
    if rank == 1:  # its log is lost
        for segment in (path / "r001-of-002").glob("*.delta"):
            segment.unlink()
    try:
        log.attach(model)
    except NewBaseNeededError as error:
        lost = str(error)
    log.rollback(0)
    log.attach(model)
    assert log.publish() == 1
    published.append(content(model, state=False))
    log.close()
    td.checkpoint.load(path / "base", other)
    assert follow(path, other).update() == 1
    followed.append(content(other, state=False))
    return raised, lost, Followed(published, followed, (_dense(model), _dense(other)))


def publishes_to_resume(
    rank: int, kinds: Sequence[Kind], optimizer: str, log: Path, whole: Path, steps: range
) -> None:
    """Goes on from a log to the last of some steps; then saves all to compare with."""
    model, names = sharded_model(kinds, 0, optimizer, seed=rank), names_of(kinds)
    with DeltaLog(log, resume=True, every_steps=1) as published:
        state = td.delta_log.resume(published, model).state
        assert steps.start == (0 if state is None else state["step"])
        for step in steps:
            train(model, rank, names, range(step, step + 1))
            published.step(state={"step": step + 1, "rank": rank})
    td.checkpoint.save(whole, model)


def resumes(
    rank: int, kinds: Sequence[Kind], side: int, optimizer: str, log: Path, whole: Path
) -> bool:
    """Whether a model that resumes has what one has that loads a checkpoint of the same step."""
    models = [sharded_model(kinds, side, optimizer, seed=seed) for seed in (1, 2)]
    report = td.delta_log.resume(log, models[0])
    assert report.state == {"step": STEPS, "rank": 0}
    td.checkpoint.load(whole, models[1])
    # an exact load has the time of the last lookup, others that of the next one
    pair = [
        [of._replace(clock=(of.clock[0], of.proposed or 0)) for of in shards_of(model)]
        for model in models
    ]
    assert len(pair[0]) == len(pair[1])
    return all(map(equal_shards, *pair)) and _dense(models[0]) == _dense(models[1])


STEPS = 6
