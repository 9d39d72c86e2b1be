"""Checkpoints and logs in S3: its protocol, and its faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import s3fs
import torch
from checkpoint_content import RowPart, same, saved_content, trained_model
from failing_bucket import failing
from ranks import Ranks
from s3_server import Environ, S3Server, options_of, s3_server
from table_content import content

import torch_dynemb as td
from torch_dynemb import checkpoint, delta_log, errors
from torch_dynemb.delta_log import DeltaLog
from torch_dynemb.delta_log.object_sink import ObjectSink
from torch_dynemb.files import byte_files, uploads

pytestmark = pytest.mark.cpu_only("is about file systems")

URL = "s3://bucket/last"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started:
        yield started


@pytest.fixture(autouse=True)
def empty_bucket(server: S3Server) -> Iterator[None]:
    yield
    server.fault = lambda environ: None
    store = fsspec.filesystem("s3")
    store.invalidate_cache()
    for name in store.find("bucket"):
        store.rm_file(name)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files, and several blocks in each."""
    monkeypatch.setattr(uploads.UrlDisk, "file_bytes", 40_000)
    monkeypatch.setattr(uploads.UrlDisk, "block_bytes", 10_000)
    monkeypatch.setattr(byte_files, "_RANGE_BYTES", 4000)


def items() -> td.DynamicEmbedding:
    torch.manual_seed(0)
    return td.DynamicEmbedding(4, name="items", optimizer=td.Adam(lr=0.1))


def step(table: td.DynamicEmbedding, first: int) -> None:
    table(torch.arange(first, first + 20)).square().sum().backward()
    table.optimizer.step()


@pytest.mark.long
@pytest.mark.usefixtures("small_files")
def test_a_checkpoint_and_a_log_in_a_bucket(server: S3Server, tmp_path: Path) -> None:
    model = trained_model()
    state = {"moments": torch.arange(9_000.0)}
    checkpoint.save(URL, model, state=state)
    checkpoint.save(tmp_path / "last", model, state=state)
    assert same(saved_content(URL), saved_content(tmp_path / "last"))
    table, copy, other = items(), items(), items()
    logs = [DeltaLog("s3://bucket/log"), DeltaLog("s3://bucket/log")]
    for log, of in zip(logs, (other, table), strict=True):
        log.attach(of)
    follower = delta_log.follow("s3://bucket/log", copy)
    for number in (1, 2):
        step(table, 10 * number)
        assert logs[1].publish() == number
        logs[1].flush()
        assert follower.update() == 1
        assert follower.update() == 0
        assert content(copy, state=False) == content(table, state=False)
    step(other, 0)
    logs[0].publish()
    with pytest.raises(errors.InUseError, match="has another writer"):
        logs[0].flush()
    sink = ObjectSink(logs[1]._own.sink.url)
    sink.lock()
    with pytest.raises(FileExistsError, match="number was written before"):
        sink.append(memoryview(bytes(100)), 2)  # refused by a conditional PUT
    for log in logs:
        log.close()


@pytest.mark.long
@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("fault", ["error", "cut", "answer cut"])
def test_faults_are_overcome(server: S3Server, fault: str) -> None:
    """Each request fails once, and is repeated by s3fs."""
    seen: set[str] = set()
    lock = threading.Lock()

    def once(environ: Environ) -> str | None:
        request = f"{environ['request']} {environ.get('HTTP_RANGE')}"
        with lock:
            new = request not in seen
            seen.add(request)
        return fault if new else None

    model = trained_model()
    server.fault = once
    checkpoint.save(URL, model)
    table, copy = items(), items()
    with DeltaLog("s3://bucket/log") as log:
        log.attach(table)
        follower = delta_log.follow("s3://bucket/log", copy)
        for number in range(3):
            step(table, 10 * number)
            log.publish()
    follower.update()
    assert follower.sequence == 3
    assert content(copy, state=False) == content(table, state=False)
    loaded = trained_model(steps=1, ids=20)
    checkpoint.load(URL, loaded)
    server.fault = lambda environ: None
    assert same(content(loaded), content(model))


@pytest.mark.long
@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("fault", ["error", "cut", "answer cut"])
def test_a_save_is_whole_or_absent_after_a_lasting_fault(
    server: S3Server, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a request on, nothing succeeds, for each request of a save."""
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    table = items()
    before = None
    for at in range(60):
        step(table, 20 * at)
        lock, count = threading.Lock(), 0

        def broken(environ: Environ, at: int = at, lock: threading.Lock = lock) -> str | None:
            nonlocal count
            with lock:
                count += 1
                return fault if count > at else None

        server.fault = broken
        try:
            checkpoint.save(URL, table, asynchronous=at % 2 == 1).wait()
            failed = False
        except OSError:
            failed = True
        server.fault = lambda environ: None
        try:
            now = saved_content(URL)
        except FileNotFoundError:
            now = None
        new = now is not None and now["embedding"].ids.numel() == 20 * (at + 1)
        assert new or (failed and same(now, before))
        before = now
        if not failed and count <= at:
            return
    raise AssertionError("no save has ended without a fault")


@pytest.mark.long
def test_slow_parts_go_on_at_once(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part is answered before three are there; a file of several parts ends whole."""
    monkeypatch.setattr(uploads, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(uploads.UrlDisk, "file_bytes", 4 << 20)
    together = threading.Barrier(3)

    def slow(environ: Environ) -> str | None:
        if ".p0" in environ["PATH_INFO"] and environ["REQUEST_METHOD"] == "PUT":
            number = int(environ["PATH_INFO"].partition(".p")[2][:4])
            if number < 3:
                together.wait()
        return None

    table = td.DynamicEmbedding(64, optimizer=td.SGD(lr=0.1))
    table(torch.arange(80_000))  # 20 MB
    server.fault = slow
    checkpoint.save(URL, table, state={"long": torch.arange(2_000_000)})
    loaded = td.DynamicEmbedding(64, optimizer=td.SGD(lr=0.1))
    report = checkpoint.load(URL, loaded)
    assert torch.equal(report.state["long"], torch.arange(2_000_000))
    assert content(loaded) == content(table)


@pytest.mark.long
def test_a_bucket_that_refuses(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="no-such-bucket"):
        checkpoint.save("s3://no-such-bucket/last", items())
    for name in ("key", "secret"):
        monkeypatch.delitem(fsspec.config.conf["s3"], name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PermissionError, match="give credentials"):
        checkpoint.save(URL, items())


def saves_and_publishes(rank: int, address: str) -> None:
    fsspec.config.conf["s3"] = options_of(address)
    table = td.private_to_rank(items())
    model = RowPart(table, rank, 2)
    table(own_ids(rank)).sum().backward()
    table.optimizer.step()
    checkpoint.save(URL, model, asynchronous=True).wait()
    log = DeltaLog("s3://bucket/log", resume=True)
    log.attach(model)
    table(own_ids(rank)[:50]).square().sum().backward()
    table.optimizer.step()
    log.publish(state={"step": 1})
    log.close()
    loaded = td.private_to_rank(items())
    part = RowPart(loaded, rank, 2)
    assert sum(of.ids for of in checkpoint.load(URL, part).tables.values()) == 200
    assert delta_log.resume("s3://bucket/log", part).state == {"step": 1}
    assert content(part) == content(model)


def own_ids(rank: int) -> torch.Tensor:
    ids = torch.arange(200)
    return ids[checkpoint.IdSlots(rank, rank + 1, 2).owned(ids)]


@pytest.mark.long
def test_ranks_share_a_bucket(server: S3Server) -> None:
    ranks = Ranks(2)
    try:
        ranks.run(saves_and_publishes, server.address)
    finally:
        ranks.stop()
    assert sum(of.ids.numel() for of in saved_content(URL).values()) == 200
    names = {name.split("/")[2] for name in fsspec.filesystem("s3").find("bucket/log")}
    assert names == {"base", "r000-of-002", "r001-of-002"}


@pytest.mark.long
@pytest.mark.parametrize("done", [False, True])
def test_a_commit_whose_answer_is_lost(server: S3Server, done: bool) -> None:
    table, copy = items(), items()
    with DeltaLog("s3://bucket/log") as log:
        log.attach(table)
        follower = delta_log.follow("s3://bucket/log", copy)
        step(table, 0)
        with failing(1, done=done, calls=("create",)):
            log.publish()
            if done:
                log.flush()  # finds the commit in the store
            else:
                with pytest.raises(OSError, match="the store has failed"):
                    log.flush()
        step(table, 10)
        log.publish()
    assert follower.update() == (2 if done else 1)
    assert content(copy, state=False) == content(table, state=False)
