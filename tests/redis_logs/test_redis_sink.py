"""A delta log in a Redis Stream: batches, writers, servers that fail."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from logged_models import Model, act, content, train
from redis.connection import AbstractConnection
from redis_server import RedisServer, running_server
from walked_logs import FATES, Calls, Ended, Fate, Place, overtake, walk

import torch_dynemb as td
from torch_dynemb.delta_log import (
    DeltaLog,
    DeltaSink,
    EndingSink,
    LockingSink,
    RedisRows,
    RedisSink,
    follow,
)
from torch_dynemb.delta_log.redis import sink as sink_module
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
    return td.delta_log.replay(RedisSink(server.url, "log"), copy, base=base), copy


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
    report = td.delta_log.resume(
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


class Messages(Place):
    """A log in Redis, a message to which is lost."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self._server, self._folder = server, folder

    def log(self) -> DeltaLog:
        return DeltaLog(self.followed())

    def followed(self) -> RedisSink:
        return RedisSink(self._server.client(), "log")

    def base(self, number: int) -> str:
        return str(self._folder / f"base-{number}")

    @contextmanager
    def lost(self, at: int, fate: Fate) -> Iterator[Calls]:
        calls = Calls(at, fate, redis.ConnectionError("lost"))
        send = AbstractConnection.send_packed_command

        def counted(connection: Any, *args: Any, **options: Any) -> None:
            def answered() -> None:
                connection.can_read(timeout=60)

            try:
                calls.run(lambda: send(connection, *args, **options), answered)
            except (redis.ConnectionError, Ended):
                connection.disconnect()
                raise

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AbstractConnection, "send_packed_command", counted)
            yield calls


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of redis, at exit
@pytest.mark.parametrize("fate", FATES)
def test_a_lost_message_loses_no_commit(server: RedisServer, tmp_path: Path, fate: str) -> None:
    for at in range(2 + 7 * FATES.index(fate), 90, 28):
        assert walk(Messages(server, tmp_path / str(at)), at, fate) >= at
        server.client().flushall()


@pytest.mark.parametrize("publishes", [False, True])
def test_a_second_trainer_attaches_before_each_message(
    server: RedisServer, tmp_path: Path, publishes: bool
) -> None:
    for at in itertools.count(1):
        if not overtake(Messages(server, tmp_path / str(at)), at, publishes=publishes):
            break
        server.client().flushall()
    assert at > 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.long
@pytest.mark.parametrize("fate", FATES)
def test_no_lost_message_loses_a_commit(server: RedisServer, tmp_path: Path, fate: str) -> None:
    for at in itertools.count(1):
        if walk(Messages(server, tmp_path / str(at)), at, fate) < at:
            break
        server.client().flushall()
    assert at > 80


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


@pytest.mark.parametrize("kept", [0, 1])
def test_a_server_that_comes_back_without_commits_is_noticed(tmp_path: Path, kept: int) -> None:
    model, generator = trained()
    base = tmp_path / "base"
    td.checkpoint.save(base, model)
    with running_server("--dbfilename", "saved") as server:
        log = DeltaLog(RedisSink(server.client(), "log"))
        log.attach(model, base=base)
        copy = Model(seed=9)
        td.checkpoint.load(base, copy)
        follower = follow(RedisSink(server.client(), "log"), copy, base=base)
        for number in (1, 2):
            if number == kept + 1:
                server.client().save()
            train(model, generator)
            log.publish()
            log.flush()
        assert follower.update() == 2
        server.kill()
        server.start()
        if kept == 0:
            server.client().flushall()
        with pytest.raises(NewBaseNeededError, match="commit 2 was read last, but it was removed"):
            follower.update()
        train(model, generator)
        log.publish()
        with pytest.raises(NewBaseNeededError, match=f"lost the log after commit {kept}"):
            log.flush()
        with pytest.raises(NewBaseNeededError, match=f"lost the log after commit {kept}"):  # noqa: PT012
            log.publish()
            log.flush()
        # what the errors say to do
        log.close()
        log.attach(model, base=base)
        assert log.publish() == kept + 1
        train(model, generator)
        log.publish()
        log.close()
        with pytest.raises(NewBaseNeededError, match="Load the base, and follow from there"):
            follower.update()
        td.checkpoint.load(base, copy)
        assert follow(RedisSink(server.client(), "log"), copy, base=base).update() == kept + 2
        assert content(copy, state=False) == content(model, state=False)


def test_a_writer_before_the_server_lost_its_data_is_refused(
    server: RedisServer, tmp_path: Path
) -> None:
    (model, generator), (other, _) = trained(), trained()
    td.checkpoint.save(tmp_path / "base", model)
    logs = [DeltaLog(RedisSink(server.client(), "log")) for _ in range(2)]
    logs[0].attach(model, base=tmp_path / "base")
    logs[0].publish()
    logs[0].flush()
    server.client().flushall()
    logs[1].attach(other, base=tmp_path / "base")
    logs[1].publish()
    logs[1].flush()
    train(model, generator)
    logs[0].publish()
    with pytest.raises(InUseError, match="has another writer"):
        logs[0].flush()
    logs[0].close()
    train(other, generator)
    assert logs[1].publish() == 2
    logs[1].close()
    assert replayed(server, tmp_path / "base")[0] == 2


@pytest.mark.parametrize("kept", [4, 0])
def test_a_stream_that_was_trimmed_needs_a_new_base(
    server: RedisServer, tmp_path: Path, kept: int
) -> None:
    model, generator = trained()
    td.checkpoint.save(tmp_path / "base", model)
    log = DeltaLog(RedisSink(server.client(), "log"))
    log.attach(model, base=tmp_path / "base")
    for _ in range(5):
        train(model, generator)
        log.publish()
    log.flush()
    server.client().xtrim("log", maxlen=kept, approximate=False)
    for _ in range(2):
        with pytest.raises(NewBaseNeededError, match="base"):
            replayed(server, tmp_path / "base")
    # a trainer that starts cannot know what followers have of the missing commits
    with (
        pytest.raises(NewBaseNeededError, match=r"publish to a new one|needs another key"),
        DeltaLog(RedisSink(server.client(), "log")) as another,
    ):
        another.attach(model, base=tmp_path / "base")
    log = DeltaLog(RedisSink(server.client(), "log2"))
    log.attach(model, base=tmp_path / "base")
    log.save(tmp_path / "later")
    log.close()
    copy = Model(seed=9)
    assert td.delta_log.replay(RedisSink(server.url, "log2"), copy, base=tmp_path / "later") == 2
    assert content(copy, state=False) == content(model, state=False)


def test_a_running_trainer_saves_a_base_for_a_trimmed_stream(
    server: RedisServer, tmp_path: Path
) -> None:
    model, generator = trained()
    td.checkpoint.save(tmp_path / "base", model)
    with DeltaLog(RedisSink(server.client(), "log")) as log:
        log.attach(model, base=tmp_path / "base")
        train(model, generator)
        log.publish()
        log.flush()
        server.client().delete("log")
        log.save(tmp_path / "later")
    assert replayed(server, tmp_path / "later")[0] == 3
    assert content(replayed(server, tmp_path / "later")[1], state=False) == content(
        model, state=False
    )


@pytest.mark.parametrize(
    ("key", "put"),
    [("log", "hset"), ("log", "xadd"), ("log:index", "xadd"), ("log:writer", "hset")],
)
def test_keys_of_other_programs_are_not_written(server: RedisServer, key: str, put: str) -> None:
    client = server.client()
    getattr(client, put)(key, *([{"a": "b"}] if put == "xadd" else ["a", "b"]))
    before = client.dump(key)
    with pytest.raises(ValueError, match=r"of another program.* take another"):
        RedisSink(client, "log").lock()
    assert (client.keys(), client.dump(key)) == ([key.encode()], before)


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
