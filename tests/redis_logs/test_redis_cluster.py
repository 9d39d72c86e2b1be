"""Rows in a Redis Cluster of three nodes: written and read as a whole, or an error by name."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from logged_models import Model, train
from redis_cluster import ClusterOfServers
from redis_server import Killed, RedisServer, calling_before, failing_after
from test_redis_rows import published, rows_in, rows_of, start

from torch_dynemb.delta_log import DeltaLog, RedisRows, RedisSink
from torch_dynemb.delta_log.follower import Follower
from torch_dynemb.delta_log.redis.row_scripts import ADVANCE
from torch_dynemb.delta_log.redis.row_writer import RowWriter
from torch_dynemb.errors import (
    DamagedFileError,
    InUseError,
    NewBaseNeededError,
    ReplacedError,
    UnsupportedFormatError,
)

pytestmark = pytest.mark.cpu_only("a Redis server")

IDS = torch.cat([torch.arange(60), torch.tensor([7, -1, 10**15, 7])])
AT_ONCE = 1e-9  # of a client with its own timeouts: nothing is read again
# messages of which one is lost: all of them, or some
every = pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.long)])


class Written:
    """A model that publishes, and its rows in a cluster.

    Attributes:
        rows: those of the program that writes.
        contents: rows of the model at each commit.
    """

    def __init__(self, server: object, folder: Path, seed: int, shards: int = 4) -> None:
        self.log_path = folder / "log"
        self.model, self.generator = Model(), torch.Generator(device="cpu").manual_seed(seed)
        train(self.model, self.generator)
        self.log: DeltaLog = start(self.model, self.log_path)
        self.rows = RedisRows(server, "clicks", shards=shards)
        self.follower: Follower = self.rows.follow(self.log_path)
        self.contents = {None: rows_of(self.model)}

    def publish(self) -> None:
        train(self.model, self.generator)
        published(self.log)
        self.contents[self.log.sequence] = rows_of(self.model)


def check_read(rows: RedisRows, written: Written, *, mixed: bool = False) -> tuple[int | None, ...]:
    """All rows are those of a commit that the answer names; return the numbers."""
    dims = {"bags.a": 4, "bags.b": 4, "one": 8}
    numbers: set[int | None] = set()
    for table, dim in dims.items():
        read = rows.read(table, IDS, mixed=mixed)
        assert (read.rows.dtype, read.rows.shape) == (torch.float32, (len(IDS), dim))
        contents = [written.contents[of.sequence] for of in read.positions]
        for id, row, found in zip(
            IDS.tolist(), read.rows.tolist(), read.found.tolist(), strict=True
        ):
            possible = [of.get((table, id)) for of in contents]
            assert (row if found else None) in possible
            assert found or not any(row)
        numbers |= {of.sequence for of in read.positions}
    return tuple(sorted(numbers, key=lambda number: number or 0))


def restart(node: RedisServer, cluster: ClusterOfServers) -> None:
    node.start()
    cluster.wait()


@pytest.fixture(params=["server", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    place: RedisServer | ClusterOfServers = request.getfixturevalue(request.param)
    return place.url


def test_rows_are_those_of_the_model_at_every_commit(url: str, tmp_path: Path) -> None:
    written = Written(url, tmp_path, 1)
    reader = RedisRows(url, "clicks")
    assert check_read(reader, written) == (None,)
    for number in range(1, 4):
        written.publish()
        assert written.follower.update() == 1
        assert check_read(reader, written) == (number,)
        assert reader.sequence == number
    empty = reader.read("one", IDS[:0])
    assert (empty.rows.shape, empty.found.shape, empty.positions) == ((0, 8), (0,), ())
    written.log.close()


def test_a_table_is_spread_and_a_batch_is_one_message_a_node(
    cluster: ClusterOfServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Written(cluster.client(), tmp_path, 2, shards=32)
    for node in cluster.nodes:
        assert 15 < node.client().dbsize() < 60
    assert rows_in(cluster, "clicks") == written.contents[None]
    reader = RedisRows(cluster.url, "clicks")
    reader.read("one", IDS)
    with failing_after(monkeypatch, 10**6, Killed()) as messages:
        reader.read("one", IDS)
    assert messages == [3]
    written.log.close()


@every
@pytest.mark.parametrize("is_sent", [False, True])
def test_a_writer_that_is_killed_at_any_time_leaves_nothing_wrong(
    cluster: ClusterOfServers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_sent: bool,
    every: int,
) -> None:
    monkeypatch.setattr("torch_dynemb.delta_log.redis.rows._KEYS", 2)
    written = Written(cluster.url, tmp_path, 3)
    reader = RedisRows(cluster.client(), "clicks", timeout=AT_ONCE)
    states = set()
    for sends in itertools.count(1, every):
        written.publish()
        with (
            failing_after(monkeypatch, sends, Killed(), is_sent=is_sent) as count,
            suppress(Killed),
        ):
            RedisRows(cluster.client(), "clicks").follow(written.log_path).update()
        number = written.log.sequence
        assert number is not None
        seen = check_read(reader, written, mixed=True)
        assert set(seen) <= {number, number - 1 or None}
        states.add(len(seen))
        RedisRows(cluster.client(), "clicks").follow(written.log_path).update()
        assert check_read(reader, written) == (number,)
        assert rows_in(cluster, "clicks") == written.contents[number]
        if count[0] < sends:
            break
    assert sends > 20
    assert every > 1 or states == {1, 2}
    written.log.close()


def test_a_commit_that_is_applied_halfway_is_named(
    cluster: ClusterOfServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_dynemb.delta_log.redis.rows._KEYS", 2)
    written = Written(cluster.url, tmp_path, 11)
    reader = RedisRows(cluster.client(), "clicks", timeout=AT_ONCE)
    written.publish()
    change, left = RowWriter.change, [1]

    def killed(writer: RowWriter, script: str, values: Mapping[str, Sequence[Any]]) -> None:
        left[0] -= script == ADVANCE
        if left[0] < 0:
            raise Killed
        change(writer, script, values)

    with monkeypatch.context() as patch:
        patch.setattr(RowWriter, "change", killed)
        with pytest.raises(Killed):
            written.follower.update()
    assert check_read(reader, written, mixed=True) == (None, 1)
    with pytest.raises(ReplacedError, match=r"last base \w+ and commit 1: call again if"):
        reader.read("bags.a", IDS)
    assert reader.read("one", IDS).positions[0].sequence is None
    written.rows.follow(written.log_path).update()
    assert check_read(reader, written) == (1,)
    written.log.close()


@every
def test_a_writer_that_was_paused_at_any_time_writes_nothing_more(
    cluster: ClusterOfServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr("torch_dynemb.delta_log.redis.rows._KEYS", 2)
    written = Written(cluster.url, tmp_path, 4)
    refusals = []

    def other_takes_over() -> None:
        RedisRows(cluster.client(), "clicks").follow(written.log_path).update()

    for sends in itertools.count(1, every):
        written.publish()
        first = RedisRows(cluster.client(), "clicks")
        with calling_before(monkeypatch, sends, other_takes_over) as count:
            try:
                first.follow(written.log_path).update()
                refusals.append(False)
            except InUseError:
                refusals.append(True)
        assert rows_in(cluster, "clicks") == written.contents[written.log.sequence]
        if count[0] < sends:
            break
    # until it has locked the rows, it is the later one; and the last round was undisturbed
    assert refusals[:-1] == sorted(refusals[:-1])
    assert sum(refusals) * every > 20
    written.log.close()


@every
def test_a_node_that_loses_its_last_writes_is_noticed(
    cluster: ClusterOfServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """One node comes back at the n-th message of an update, as it was before the update."""
    monkeypatch.setattr("torch_dynemb.delta_log.redis.rows._KEYS", 2)
    written = Written(cluster.client(), tmp_path, 5)
    reader = RedisRows(cluster.client(), "clicks", timeout=AT_ONCE)
    noticed = 0
    for sends in itertools.count(1, every):
        node = cluster.nodes[sends // every % 3].client()
        saved = {key: node.dump(key) for key in node.scan_iter()}

        def go_back(node: redis.Redis = node, saved: dict[bytes, bytes] = saved) -> None:
            node.flushall()
            for key, value in saved.items():
                node.restore(key, 0, value)

        written.publish()
        with (
            calling_before(monkeypatch, sends, go_back) as count,
            suppress(NewBaseNeededError),
        ):
            written.follower.update()
        if count[0] < sends:
            break
        check_read(reader, written, mixed=True)
        written.publish()
        try:
            written.follower.update()
        except NewBaseNeededError:
            noticed += 1
            written.follower = written.rows.follow(written.log_path)
            written.follower.update()
        assert check_read(reader, written) == (written.log.sequence,)
        assert rows_in(cluster, "clicks") == written.contents[written.log.sequence]
    assert noticed * every > 10
    # without any of its data, it is loaded anew
    cluster.nodes[1].client().flushall()
    with pytest.raises(NewBaseNeededError, match=r"no whole rows in .*call follow\(log\)|Call"):
        check_read(reader, written)
    written.publish()
    with pytest.raises(NewBaseNeededError, match="lost its last writes"):
        written.follower.update()
    written.rows.follow(written.log_path).update()
    assert check_read(reader, written) == (written.log.sequence,)
    written.log.close()


def test_a_reader_waits_for_the_end_of_a_commit(
    cluster: ClusterOfServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_dynemb.delta_log.redis.rows._KEYS", 2)
    written = Written(cluster.url, tmp_path, 6)
    reader = RedisRows(cluster.url, "clicks", timeout=60)
    reader.read("one", IDS)
    written.publish()
    found = []

    def read_in_a_thread() -> None:
        thread = threading.Thread(target=lambda: found.append(reader.read("bags.a", IDS)))
        threads.append(thread)
        thread.start()

    threads: list[threading.Thread] = []
    with calling_before(monkeypatch, 8, read_in_a_thread):
        written.follower.update()
    threads[0].join()
    assert [len(read.positions) for read in found] == [1]
    written.log.close()


def test_nodes_that_do_not_answer_are_named(cluster: ClusterOfServers, tmp_path: Path) -> None:
    written = Written(cluster.url, tmp_path, 7)
    reader = RedisRows(cluster.url, "clicks", timeout=60)  # where an answer is expected
    impatient = RedisRows(cluster.url, "clicks", timeout=1, retries=0)
    for of in (reader, impatient):
        check_read(of, written)
    key = "clicks:one:3"
    node, port = cluster.node_of(key), cluster.port_of(key)
    others = [shard for shard in range(4) if cluster.port_of(f"clicks:one:{shard}") != port]
    with node.stopped(), pytest.raises(TimeoutError, match=rf":{port}, database 0 does not answer"):
        impatient.read("one", IDS)
    assert check_read(reader, written) == (None,)
    node.kill()
    try:
        with pytest.raises(ConnectionError, match=rf":{port}, database 0 cannot be reached"):
            reader.read("one", IDS)
        others = [id for id in range(60) if id % 4 in others]
        assert len(reader.read("one", torch.tensor(others)).positions) == 1
        written.publish()
        with pytest.raises(ConnectionError, match=f":{port}"):
            written.follower.update()
    finally:
        restart(node, cluster)
    assert set(check_read(reader, written, mixed=True)) <= {None, 1}
    written.follower.update()
    assert check_read(reader, written) == (1,)
    written.log.close()


def test_slots_that_move_are_followed(cluster: ClusterOfServers, tmp_path: Path) -> None:
    written = Written(cluster.url, tmp_path, 8)
    reader = RedisRows(cluster.url, "clicks", timeout=60)
    check_read(reader, written)
    key = "clicks:one:3"
    before, after = (
        cluster.node_of(key),
        next(node for node in cluster.nodes if node is not cluster.node_of(key)),
    )
    slot = cluster.client().keyslot(key)
    cluster.begin_move(slot, before, after)
    try:
        assert check_read(reader, written) == (None,)
        written.publish()
        with pytest.raises(ConnectionError, match=r"RedisRows: Redis.* cannot be reached \("):
            written.follower.update()  # keys that the other node lacks may be on their way
        check_read(reader, written, mixed=True)
        cluster.end_move(slot, before, after)
        written.follower.update()
        assert check_read(reader, written) == (1,)
    finally:
        cluster.end_move(slot, before, after)
        cluster.begin_move(slot, after, before)
        cluster.end_move(slot, after, before)
    written.log.close()


def test_damaged_rows_and_other_versions_are_refused(
    cluster: ClusterOfServers, tmp_path: Path
) -> None:
    written = Written(cluster.url, tmp_path, 9)
    reader, client = RedisRows(cluster.url, "clicks"), cluster.client()
    (id, *_) = (id for table, id in written.contents[None] if table == "one")
    key = f"clicks:one:{id % 4}"
    value = client.hget(key, id)
    for wrong, error in [
        (value[:-1], DamagedFileError),
        (value[:4] + b"\7" + value[5:], DamagedFileError),
        (b"", UnsupportedFormatError),
        (b"\2" + value[1:], UnsupportedFormatError),
        (value[:2] + b"\7" + value[3:], UnsupportedFormatError),
    ]:
        client.hset(key, id, wrong)
        with pytest.raises(error, match="table 'one' of RedisRows"):
            reader.read("one", torch.tensor([id]))
    client.hset(key, id, value)
    check_read(reader, written)
    # another load, with other hashes, after one that was not complete
    client.hset("clicks", "position", "")
    RedisRows(cluster.url, "clicks", shards=16).load(written.log_path / "base")
    assert check_read(reader, written) == (None,)
    client.hset("clicks", "version", 1)
    with pytest.raises(UnsupportedFormatError, match="format version b'1', but this library"):
        RedisRows(cluster.url, "clicks").read("one", IDS)
    written.log.close()


def test_wrong_arguments_are_refused(cluster: ClusterOfServers, tmp_path: Path) -> None:
    written = Written(cluster.url, tmp_path, 10)
    with pytest.raises(KeyError, match=r"has no table 'two', but \['bags.a', 'bags.b', 'one'\]"):
        written.rows.read("two", IDS)
    for ids in (IDS.int(), IDS.reshape(2, -1), [1]):
        with pytest.raises(TypeError, match="expected an int64 tensor"):
            written.rows.read("one", ids)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no whole rows: wait until"):
        RedisRows(cluster.url, "other").read("one", IDS)
    with pytest.raises(ValueError, match=r"is a node of a Redis Cluster: give 'redis\+cluster://"):
        RedisRows(f"redis://127.0.0.1:{cluster.ports[0]}", "other").load(written.log_path / "base")
    for server in (cluster.url, cluster.client()):
        with pytest.raises(ValueError, match="RedisSink: server is a Redis Cluster, but a log"):
            RedisSink(server, "log")
    with pytest.raises(ValueError, match="without decode_responses"):
        RedisRows(cluster.client(decode_responses=True), "clicks")
    with pytest.raises(ValueError, match="braces would put all rows into one slot"):
        RedisRows(cluster.url, "{clicks}")
    with pytest.raises(ValueError, match="timeout is 0, expected more than 0"):
        RedisRows(cluster.url, "clicks", timeout=0)
    with pytest.raises(ConnectionError, match="Redis Cluster cannot be reached"):
        RedisRows("redis+cluster://127.0.0.1:1", "clicks")
    cluster.nodes[2].client().config_set("maxmemory", "100mb")
    cluster.nodes[2].client().config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ValueError, match=r"allkeys-lru.*set it to noeviction"):
            written.rows.load(written.log_path / "base")
    finally:
        cluster.nodes[2].client().config_set("maxmemory", 0)
        cluster.nodes[2].client().config_set("maxmemory-policy", "noeviction")
    written.log.close()
