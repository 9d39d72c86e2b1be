"""Rows by id in Redis are those of the model that publishes, for readers without PyTorch."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import redis
import torch
from logged_models import Model, act, train
from redis_cluster import ClusterOfServers
from redis_server import Killed, RedisServer, calling_before, failing_after

import torch_dynemb as td
from torch_dynemb.delta_log import Commit, DeltaLog, RedisRows, TableDelta
from torch_dynemb.errors import InUseError, NewBaseNeededError, UnsupportedFormatError
from torch_dynemb.parts.table_parts import PACKED, parts_of
from torch_dynemb.table.row_access import read_rows
from torch_dynemb.table.tables import exported

pytestmark = pytest.mark.cpu_only("a Redis server")

PAGE = Path(td.__file__).parent / "delta_log" / "README.md"
FORMATS = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16}
Rows = dict[tuple[str, int], list[float]]
# messages of which one is lost: all of them, or some
every = pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.long)])


def rows_in(server: RedisServer | ClusterOfServers, name: str) -> Rows:
    """All rows, read by the documented layout: every field, and none twice."""
    client, found = server.client(), {}
    shards, tables, position = client.hmget(name, "shards", "tables", "position")
    shards = int(shards)
    for table, columns in json.loads(tables).items():
        for shard in range(shards):
            escaped = table.replace("%", "%25").replace(":", "%3A")
            fields = client.hgetall(f"{name}:{escaped}:{shard}")
            assert fields.pop(b"position") == position
            del fields[b"writer"]
            for field, value in fields.items():
                assert int(field) % shards == shard  # of Python, also for negative ids
                version, dtype, width = (
                    int.from_bytes(value[begin:end], "little")
                    for begin, end in ((0, 2), (2, 4), (4, 8))
                )
                row = torch.frombuffer(bytearray(value[8:]), dtype=FORMATS[dtype])
                assert (version, len(row), width) == (1, columns, columns)
                found[table, int(field)] = row.tolist()
    return found


def rows_of(model: torch.nn.Module) -> Rows:
    """Those of a model."""
    found: Rows = {}
    for part in parts_of(model):
        for batch in exported(part.group.tables, part.table, 1 << 20):
            values = read_rows(part.group.tables, part.table, batch.ids, batch.handles)
            for id, row in zip(batch.ids.tolist(), values.rows.tolist(), strict=True):
                found[part.name, id] = row
    return found


def start(model: Model, log: Path) -> DeltaLog:
    publisher = DeltaLog(log)
    publisher.attach(model)
    return publisher


def published(publisher: DeltaLog) -> None:
    publisher.publish()
    publisher.flush()


def test_rows_are_those_of_the_model_at_every_commit(server: RedisServer, tmp_path: Path) -> None:
    model, generator = Model(), torch.Generator(device="cpu").manual_seed(1)
    lowest = torch.tensor([-(2**63), -1, 2**63 - 1])
    model.bags.group.insert_or_assign(1, lowest, torch.randn(3, 4))
    train(model, generator)
    publisher = start(model, tmp_path / "log")
    rows = RedisRows(server.url, "clicks", shards=8)
    assert rows.sequence is None
    follower = rows.follow(tmp_path / "log")
    assert rows_in(server, "clicks") == rows_of(model)
    for number in range(1, 9):
        act(model, generator)
        published(publisher)
        assert follower.update() == 1
        assert rows.sequence == number
        assert rows_in(server, "clicks") == rows_of(model)
        if number % 3 == 0:  # another process goes on
            rows = RedisRows(server.url, "clicks")
            follower = rows.follow(tmp_path / "log")
            assert follower.sequence == number
    publisher.close()


@every
@pytest.mark.parametrize("is_sent", [False, True])
def test_a_follower_that_is_killed_at_any_time_goes_on(
    server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_sent: bool,
    every: int,
) -> None:
    monkeypatch.setattr("torch_dynemb.delta_log.redis.rows._ROWS", 4)
    model, generator = Model(), torch.Generator(device="cpu").manual_seed(2)
    train(model, generator)
    publisher = start(model, tmp_path / "log")
    for _ in range(2):
        act(model, generator)
        published(publisher)
    publisher.close()
    expected = rows_of(model)
    for sends in itertools.count(1 + 2 * is_sent, every):
        try:
            with failing_after(monkeypatch, sends, Killed(), is_sent=is_sent):
                RedisRows(server.url, "clicks", shards=2).follow(tmp_path / "log").update()
            break
        except Killed:
            # the next one comes further: it loads anew, or goes on from the last whole commit
            RedisRows(server.url, "clicks", shards=2).follow(tmp_path / "log").update()
            assert rows_in(server, "clicks") == expected
            server.client().flushall()
    assert sends > 20
    assert rows_in(server, "clicks") == expected


@every
@pytest.mark.parametrize(
    ("is_sent", "lost"),
    [
        (False, redis.ConnectionError("lost")),
        (True, redis.ConnectionError("lost")),
        (True, KeyboardInterrupt()),
    ],
)
def test_a_connection_that_is_lost_at_any_time_is_made_again(
    server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_sent: bool,
    lost: BaseException,
    every: int,
) -> None:
    monkeypatch.setattr("torch_dynemb.delta_log.redis.rows._ROWS", 4)
    model, generator = Model(), torch.Generator(device="cpu").manual_seed(7)
    train(model, generator)
    publisher = start(model, tmp_path / "log")
    follower = RedisRows(server.client(), "clicks", shards=2).follow(tmp_path / "log")
    for sends in itertools.count(1 + is_sent, every):
        train(model, generator)
        published(publisher)
        with (
            failing_after(monkeypatch, sends, lost, is_sent=is_sent) as count,
            suppress(ConnectionError, KeyboardInterrupt),  # the built-in, not that of Redis
        ):
            follower.update()
        follower.update()
        assert rows_in(server, "clicks") == rows_of(model)
        if count[0] < sends:
            break
    assert sends > 8
    publisher.close()


@every
def test_a_program_that_was_paused_at_any_time_writes_nothing_more(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr("torch_dynemb.delta_log.redis.rows._ROWS", 4)
    model, generator = Model(), torch.Generator(device="cpu").manual_seed(8)
    train(model, generator)
    publisher = start(model, tmp_path / "log")
    for _ in range(2):
        train(model, generator)
        published(publisher)
    publisher.close()
    expected = rows_of(model)

    def other_takes_over() -> None:
        RedisRows(server.url, "clicks", shards=2).follow(tmp_path / "log").update()

    refusals = []
    for sends in itertools.count(1, every):
        server.client().flushall()
        with calling_before(monkeypatch, sends, other_takes_over) as count:
            try:
                RedisRows(server.url, "clicks", shards=2).follow(tmp_path / "log").update()
                refusals.append(False)
            except InUseError:
                refusals.append(True)
        assert rows_in(server, "clicks") == expected
        if count[0] < sends:
            break
    # until it has locked the rows, it is the later one; and the last round was undisturbed
    assert refusals[:-1] == sorted(refusals[:-1])
    assert sum(refusals) * every > 20


def test_rows_go_to_a_newer_base(server: RedisServer, tmp_path: Path) -> None:
    model, generator = Model(), torch.Generator(device="cpu").manual_seed(3)
    train(model, generator)
    publisher = start(model, tmp_path / "log")
    rows = RedisRows(server.url, "clicks")
    rows.follow(tmp_path / "log")
    published(publisher)
    for _ in range(2):
        act(model, generator)
        publisher.save()  # the second one drops the base that the rows have
    publisher.truncate(2)
    publisher.close()
    newest = sorted((tmp_path / "log").glob("base-*"))[-1]
    rows.load(newest)
    assert rows_in(server, "clicks") == rows_of(model)
    assert rows.follow(tmp_path / "log").update() == 1
    assert rows_in(server, "clicks") == rows_of(model)


@every
@pytest.mark.parametrize("later", [1, 6])
def test_a_server_that_loses_its_last_writes_is_noticed(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int, every: int
) -> None:
    """It comes back at the n-th message of an update, as it was some messages before."""
    monkeypatch.setattr("torch_dynemb.delta_log.redis.rows._ROWS", 4)
    model, generator = Model(), torch.Generator(device="cpu").manual_seed(9)
    train(model, generator)
    publisher = start(model, tmp_path / "log")
    rows = RedisRows(server.client(), "clicks", shards=2)
    follower = rows.follow(tmp_path / "log")
    client, noticed = server.client(), 0
    saved: dict[bytes, bytes] = {}

    def save() -> None:
        saved.update({key: client.dump(key) for key in client.scan_iter()})

    def go_back() -> None:
        client.flushall()
        for key, value in saved.items():
            client.restore(key, 0, value)

    for sends in itertools.count(later, every):
        saved.clear()
        train(model, generator)
        published(publisher)
        with (
            calling_before(monkeypatch, sends, save),
            calling_before(monkeypatch, sends + later, go_back) as count,
        ):
            try:
                follower.update()
            except NewBaseNeededError:  # call follow(log) again
                noticed += 1
            else:
                is_whole = False
                with suppress(AssertionError):
                    is_whole = rows_in(server, "clicks") == rows_of(model)
                if not is_whole:
                    assert count[0] >= sends + later
                    # between two hashes: the next write to the one that lost something notices it
                    train(model, generator)
                    published(publisher)
                    with pytest.raises(NewBaseNeededError, match="lost its last writes"):
                        follower.update()
                    noticed += 1
        if noticed == 0 and count[0] < sends + later:
            follower.update()
        elif noticed:
            follower = rows.follow(tmp_path / "log")
        follower.update()
        assert rows_in(server, "clicks") == rows_of(model)
        if count[0] < sends + later:
            break
    assert noticed * every > 3
    server.client().flushall()
    train(model, generator)
    published(publisher)
    with pytest.raises(NewBaseNeededError, match=r"lost its last writes.*call follow\(log\) again"):
        follower.update()
    rows.follow(tmp_path / "log").update()
    assert rows_in(server, "clicks") == rows_of(model)
    publisher.close()


def test_names_share_no_keys(server: RedisServer, tmp_path: Path) -> None:
    found = {}
    for name, table in [("a", "b:c"), ("a:b", "c"), ("a", "b%3Ac"), ("a:b:c", "%")]:
        model = td.DynamicEmbeddingBagCollection(
            [td.TableConfig(table, 4)], optimizer=td.SGD(lr=0.1)
        )
        model.group.insert(0, torch.arange(len(found), 20))
        td.checkpoint.save(tmp_path / f"{len(found)}", model)
        RedisRows(server.url, name, shards=4).load(tmp_path / f"{len(found)}")
        found[name] = rows_of(model)
        for known, expected in found.items():
            assert rows_in(server, known) == expected


@pytest.mark.parametrize("key", ["clicks", "clicks:bags.a:3", "{clicks:bags.b:9}:next"])
@pytest.mark.parametrize("put", ["hset", "sadd"])
def test_keys_of_other_programs_are_not_written(
    server: RedisServer, tmp_path: Path, key: str, put: str
) -> None:
    client = server.client()
    getattr(client, put)(key, "name", "value")
    before = client.dump(key)
    td.checkpoint.save(tmp_path / "base", Model())
    with pytest.raises(ValueError, match=r"of another program.* take another name"):
        RedisRows(client, "clicks").load(tmp_path / "base")
    assert (client.keys(), client.dump(key)) == ([key.encode()], before)


def test_a_rollback_is_noticed_by_a_program_that_starts(
    server: RedisServer, tmp_path: Path
) -> None:
    model, generator = Model(), torch.Generator(device="cpu").manual_seed(4)
    publisher = start(model, tmp_path / "log")
    train(model, generator)
    published(publisher)
    train(model, generator)
    published(publisher)
    publisher.close()
    rows = RedisRows(server.url, "clicks")
    assert rows.follow(tmp_path / "log").update() == 2
    publisher.rollback(1)
    publisher.attach(model)
    train(model, generator)
    published(publisher)
    published(publisher)
    publisher.close()
    with pytest.raises(NewBaseNeededError, match="the log was rolled back and continued"):
        RedisRows(server.url, "clicks").follow(tmp_path / "log").update()


def test_what_cannot_be_written_is_refused(server: RedisServer, tmp_path: Path) -> None:
    model, generator = Model(), torch.Generator(device="cpu").manual_seed(5)
    publisher = start(model, tmp_path / "log")
    with pytest.raises(ValueError, match="shards is 3, expected a power of two"):
        RedisRows(server.url, "clicks", shards=3)
    first = RedisRows(server.url, "clicks")
    one = first.follow(tmp_path / "log")
    other = RedisRows(server.url, "clicks").follow(tmp_path / "log")
    train(model, generator)
    published(publisher)
    assert other.update() == 1
    with pytest.raises(InUseError, match="has another writer, which has called follow or load"):
        one.update()
    assert first.follow(tmp_path / "log").update() == 0  # goes on from what is there
    with pytest.raises(ValueError, match=r"shards is 8, but .* has 256 for each table"):
        RedisRows(server.url, "clicks", shards=8).follow(tmp_path / "log")
    with pytest.raises(RuntimeError, match="no base is loaded: call follow"):
        td.delta_log.follow(tmp_path / "log", RedisRows(server.url, "clicks"), sequence=0).update()
    none = torch.empty(0, dtype=torch.int64)
    packed = TableDelta(4, PACKED, td.RowBatch(none, torch.empty(0, 4)), none, None, 0)
    with pytest.raises(ValueError, match=r"table 'bags\.a' has trained rows of 8 bits"):
        first.check(Commit(2, 2, {"bags.a": packed}, {}))
    server.client().hset("clicks", "version", 1)
    with pytest.raises(UnsupportedFormatError, match="format version b'1', but this library"):
        _ = first.sequence
    publisher.close()


def test_the_reader_of_the_page_needs_no_torch(server: RedisServer, tmp_path: Path) -> None:
    model, generator = Model(), torch.Generator(device="cpu").manual_seed(6)
    model.bags.group.insert_or_assign(1, torch.tensor([-7]), torch.randn(1, 4))
    train(model, generator)
    publisher = start(model, tmp_path / "log")
    RedisRows(server.url, "clicks").follow(tmp_path / "log")
    publisher.close()
    (reader,) = re.findall(r"```python\n(import struct\n.*?)```", PAGE.read_text(), re.DOTALL)
    expected = rows_of(model)
    wanted = [*expected, ("bags.b", 10**15)]
    program = f"""
import json, sys
{reader}
server = redis.Redis.from_url({server.url!r})
print(json.dumps([read_rows(server, "clicks", table, [id])[0] for table, id in {wanted!r}]))
assert "torch" not in sys.modules
"""
    reply = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(reply.stdout) == [*expected.values(), None]
    assert len(reader.splitlines()) <= 30
