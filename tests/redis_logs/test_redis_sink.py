"""A delta log in a Redis Stream: batches, writers, servers that fail."""

from __future__ import annotations

import itertools
import random
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import redis
import torch
from logged_models import Model, act, content, train
from redis_server import RedisServer, failing_after, running_server

import torch_dynemb as td
from torch_dynemb.checkpoint import (
    DeltaLog,
    DeltaSink,
    EndingSink,
    LockingSink,
    RedisRows,
    RedisSink,
    follow,
)
from torch_dynemb.checkpoint.redis import sink as sink_module
from torch_dynemb.errors import InUseError, NewBaseNeededError, NoRoomError

pytestmark = pytest.mark.cpu_only("a Redis server")


def batch_of(number: int, size: int) -> bytes:
    return bytes((number + at) % 251 for at in range(size))


@pytest.mark.parametrize("seed", range(3))
def test_batches_are_those_of_a_dict(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random appends, truncations, rollbacks and reads; batches of one piece and of several."""
    monkeypatch.setattr(sink_module, "_PIECE_BYTES", 64)
    draw = random.Random(seed)
    sink, reader = RedisSink(server.client(), "log"), RedisSink(server.url, "log")
    assert all(isinstance(sink, kind) for kind in (DeltaSink, EndingSink, LockingSink))
    expected: dict[int, bytes] = {}
    following = 1
    for _ in range(60):
        kind = draw.randrange(8)
        if kind < 4:
            expected[following] = batch_of(draw.randrange(251), draw.choice([48, 49, 112, 300]))
            sink.append(memoryview(expected[following]), following)
            following += 1
        elif kind == 4:
            before = draw.randrange(following + 2)
            sink.truncate(before)
            last = max(expected, default=0)
            expected = {n: data for n, data in expected.items() if n >= min(before, last)}
        elif kind == 5:
            after = draw.randrange(max(0, following - 3), following)
            sink.drop_after(after)
            expected = {n: data for n, data in expected.items() if n <= after}
            following = min(following, after + 1)
        begin = draw.randrange(following + 2)
        found = [bytes(data) for data in reader.read(begin)]
        assert found == [data for n, data in sorted(expected.items()) if n >= begin]
        number = draw.randrange(1, following + 2)
        data = expected.get(number)
        assert reader.ending(number) == (None if data is None else data[-48:])
    client = server.client()
    pieces = sum(1 + -(-(len(data) - 48) // 64) for data in expected.values())
    assert client.xlen("log") == pieces  # nothing that was dropped stays


def trained() -> tuple[Model, torch.Generator]:
    model, generator = Model(), torch.Generator(device="cpu").manual_seed(3)
    train(model, generator)
    return model, generator


def replayed(server: RedisServer, base: Path) -> tuple[int, Model]:
    copy = Model(seed=9)
    return td.checkpoint.replay(RedisSink(server.url, "log"), copy, base=base), copy


def test_followers_and_trainers_go_on_from_redis(server: RedisServer, tmp_path: Path) -> None:
    model, generator = trained()
    td.checkpoint.save(tmp_path / "base", model)
    log = DeltaLog(RedisSink(server.url, "log"), resume=True)
    log.attach(model, base=tmp_path / "base")
    copy = Model(seed=9)
    td.checkpoint.load(tmp_path / "base", copy)
    follower = follow(RedisSink(server.url, "log"), copy, base=tmp_path / "base")
    for number in range(1, 6):
        act(model, generator)
        assert log.publish(state={"number": number}) == number
        log.flush()
        assert follower.update() == 1
        assert content(copy) == content(model)
    log.save(tmp_path / "later", state={"number": 5})
    follower.update()
    log.save(tmp_path / "latest", state={"number": 5})
    assert server.client().zrange("log:index", 0, 0, withscores=True)[0][1] > 5  # trimmed by base
    log.close()
    # a trainer on another machine takes up the log
    other = Model(seed=8)
    report = td.checkpoint.resume(
        [RedisSink(server.url, "log")], other, base=tmp_path / "latest", progress=False
    )
    assert report.state == {"number": 5}
    assert content(other) == content(model)
    log = DeltaLog(RedisSink(server.url, "log"), resume=True)
    log.attach(other, base=tmp_path / "latest")
    train(other, generator)
    log.publish()
    log.close()
    follower.update()
    assert content(copy) == content(other)


def test_the_last_writer_that_attaches_is_the_one(server: RedisServer, tmp_path: Path) -> None:
    model, generator = trained()
    td.checkpoint.save(tmp_path / "base", model)
    first = DeltaLog(RedisSink(server.url, "log"))
    first.attach(model, base=tmp_path / "base")
    first.publish()
    first.flush()
    second, other = DeltaLog(RedisSink(server.url, "log")), Model(seed=9)
    td.checkpoint.load(tmp_path / "base", other)
    second.attach(other, base=tmp_path / "base")
    train(model, generator)
    first.publish()
    with pytest.raises(InUseError, match=r"RedisSink.append: .* has another writer"):
        first.flush()
    train(other, generator)
    assert second.publish() == 2
    second.flush()
    with pytest.raises(InUseError):  # nor does its cleaning up remove the commit of the other one
        first.publish()
    train(model, generator)  # training goes on
    first.close()
    assert replayed(server, tmp_path / "base")[0] == 2
    assert content(replayed(server, tmp_path / "base")[1], state=False) == content(
        other, state=False
    )
    second.close()


def test_a_server_that_is_gone_stops_no_training(own_server: RedisServer, tmp_path: Path) -> None:
    model, generator = trained()
    td.checkpoint.save(tmp_path / "base", model)
    log = DeltaLog(RedisSink(own_server.client(), "log"), every_steps=1)
    log.attach(model, base=tmp_path / "base")
    train(model, generator)
    assert log.step() == 1
    log.flush()
    own_server.kill()
    train(model, generator)
    assert log.step() == 2  # its thread fails
    train(model, generator)
    with pytest.raises(ConnectionError, match=r"RedisSink.append: Redis at .* cannot be reached"):
        log.step()
    assert log.sequence == 1
    own_server.start()
    train(model, generator)
    assert log.step() == 2
    log.close()
    sequence, copy = replayed(own_server, tmp_path / "base")
    assert sequence == 2
    assert content(copy, state=False) == content(model, state=False)


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_connection_that_is_lost_at_any_time_loses_nothing(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    model, generator = trained()
    td.checkpoint.save(tmp_path / "base", model)
    log = DeltaLog(RedisSink(server.client(), "log"))
    log.attach(model, base=tmp_path / "base")
    for sends in itertools.count(1):
        train(model, generator)
        lost = redis.ConnectionError("lost")
        with (
            failing_after(monkeypatch, sends, lost, is_sent=is_sent) as count,
            suppress(ConnectionError),  # the built-in, not that of Redis
        ):
            log.publish()
            log.flush()
        if count[0] < sends:
            break
    assert sends >= 4  # watch, read, and the transaction
    sequence = log.publish()
    log.close()
    reached, copy = replayed(server, tmp_path / "base")
    assert reached == sequence
    assert content(copy, state=False) == content(model, state=False)


def test_a_server_without_memory_stops_no_training(own_server: RedisServer, tmp_path: Path) -> None:
    model, generator = trained()
    td.checkpoint.save(tmp_path / "base", model)
    log = DeltaLog(RedisSink(own_server.client(), "log"))
    log.attach(model, base=tmp_path / "base")
    log.publish()
    log.flush()
    own_server.client().config_set("maxmemory", "1mb")
    for _ in range(2):
        train(model, generator)
        log.publish()
        with pytest.raises(NoRoomError, match="has no memory left: raise its maxmemory"):
            log.flush()
    own_server.client().config_set("maxmemory", 0)
    train(model, generator)
    assert log.publish() == 2
    log.close()
    sequence, copy = replayed(own_server, tmp_path / "base")
    assert sequence == 2
    assert content(copy, state=False) == content(model, state=False)


def test_a_server_that_lost_its_data_is_noticed(server: RedisServer, tmp_path: Path) -> None:
    model, generator = trained()
    td.checkpoint.save(tmp_path / "base", model)
    log = DeltaLog(RedisSink(server.url, "log"))
    log.attach(model, base=tmp_path / "base")
    log.publish()
    log.flush()
    copy = Model(seed=9)
    td.checkpoint.load(tmp_path / "base", copy)
    follower = follow(RedisSink(server.url, "log"), copy, base=tmp_path / "base")
    assert follower.update() == 1
    server.client().flushall()
    with pytest.raises(NewBaseNeededError, match="commit 1 was read last, but it was removed"):
        follower.update()
    train(model, generator)
    log.publish()
    with pytest.raises(NewBaseNeededError, match="has lost the log"):
        log.close()


def test_wrong_servers_are_refused(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (RedisSink, RedisRows):
        with pytest.raises(TypeError, match=f"{kind.__name__}: server is 3, expected a URL"):
            kind(3, "log")
        with pytest.raises(TypeError, match=f"{kind.__name__}: "):
            kind(server.url, 3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"{kind.__name__}: server is a URL") as refused:
            kind("http://user:secret@host", "log")
        assert "secret" not in str(refused.value)
        with pytest.raises(ValueError, match="without decode_responses"):
            kind(server.client(decode_responses=True), "log")
    with running_server("--requirepass", "secret") as guarded:
        for password in (None, "wrong"):
            sink = RedisSink(guarded.client(password=password), "log")
            with pytest.raises(
                PermissionError, match=r"RedisSink\.lock: Redis at .* user"
            ) as error:
                sink.lock()
            assert "secret" not in str(error.value)
        RedisSink(guarded.client(password="secret"), "log").lock()
        client = guarded.client(password="secret")
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(ValueError, match=r"allkeys-lru.*set it to noeviction"):
            RedisSink(client, "other").lock()
    monkeypatch.setitem(sys.modules, "redis", None)
    for kind in (RedisSink, RedisRows):
        with pytest.raises(ImportError, match=r"pip install torch_dynemb\[redis\]"):
            kind("redis://localhost", "log")
