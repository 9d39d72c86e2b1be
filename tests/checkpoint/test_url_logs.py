"""Delta logs at URLs: an object for each commit, one writer, followers and trainers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest
import torch
from changing_tables import train
from checkpoint_content import same, trained_model
from table_content import content
from walked_logs import FATES, Calls, Fate, Place, overtake, walk

import torch_dynemb as td
from torch_dynemb import checkpoint, delta_log, errors
from torch_dynemb.delta_log import DeltaLog, resume
from torch_dynemb.files.object_store import ObjectStore

pytestmark = pytest.mark.cpu_only("is about file systems")

URL = "memory://bucket/log"
STORE = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    yield
    STORE.store.clear()
    STORE.pseudo_dirs[:] = [""]


@pytest.fixture(params=["conditional", "epoch"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with conditional PUTs, and one that does not obey the condition."""
    if request.param == "epoch":
        monkeypatch.setattr(ObjectStore, "create", ObjectStore.put)
    return str(request.param)


def items() -> td.DynamicEmbedding:
    torch.manual_seed(0)
    return td.DynamicEmbedding(4, name="items", optimizer=td.Adam(lr=0.1))


def step(table: td.DynamicEmbedding, first: int) -> None:
    table(torch.arange(first, first + 20)).square().sum().backward()
    table.optimizer.step()


def batches() -> list[str]:
    return sorted(name.rpartition("/")[2] for name in STORE.store if name.endswith(".delta"))


def test_followers_and_trainers_go_on_from_a_url(store: str) -> None:
    model = trained_model(ids=200)
    log = DeltaLog(URL, resume=True, retain=2)
    assert resume(log, model).state is None
    followed = trained_model(ids=200)
    follower = delta_log.follow(URL, followed)
    assert follower.update() == 0
    for number in range(1, 4):
        train(model["tables"], number)
        assert log.publish(state={"number": number}) == number
        log.flush()
        assert follower.update() == 1
        assert follower.update() == 0
        resumed = trained_model(steps=1, ids=20)
        assert resume(URL, resumed).state == {"number": number}
        assert same(content(resumed), content(model))
        assert content(followed, state=False) == content(model, state=False)
    assert batches() == [f"{number:020}.delta" for number in range(1, 4)]
    assert log.save(state={"number": 3}) == 4
    train(model["tables"], 5)
    log.publish(state={"number": 6})
    log.publish(state={"number": 7})  # names the base, and drops commits
    log.close()
    assert len(batches()) < 7
    assert follower.update() == 4
    again = trained_model(steps=1, ids=20)
    log = DeltaLog(URL, resume=True)
    assert resume(log, again).state == {"number": 7}
    assert same(content(again), content(model))
    log.close()
    with pytest.raises(ValueError, match="the log has no such commit"):
        DeltaLog(URL, resume=True).rollback(2)
    DeltaLog(URL, resume=True).rollback(6)
    assert resume(URL, again).state == {"number": 6}
    with pytest.raises(errors.NewBaseNeededError, match="rolled back"):
        follower.update()


def test_live_tables_follow_a_url() -> None:
    table = items()
    with DeltaLog(URL) as log:
        log.attach(table)
        live = td.serving.live(table, headroom=100)
        follower = delta_log.follow(URL, live)
        step(table, 0)
        log.publish()
    assert follower.update() == 1
    ids = torch.arange(20)
    assert torch.equal(live(ids), table.eval()(ids))


def test_a_second_publisher_is_refused(store: str) -> None:
    one, other = items(), items()
    step(one, 0)
    logs = [DeltaLog(URL), DeltaLog(URL)]
    logs[0].attach(one)
    logs[1].attach(other)
    step(other, 100)
    logs[1].publish()
    logs[1].flush()
    written = {name: STORE.cat(name) for name in STORE.store}
    step(one, 200)
    logs[0].publish()
    for _ in range(2):
        with pytest.raises(errors.InUseError, match="has another writer"):
            logs[0].flush() if _ == 0 else logs[0].publish()
    assert {name: STORE.cat(name) for name in STORE.store} == written
    logs[0].close()
    logs[1].publish()
    logs[1].close()
    assert len(batches()) == 2


class Requests(Place):
    """A log at ``URL``, a request of which is lost."""

    def log(self) -> DeltaLog:
        return DeltaLog(URL)

    def followed(self) -> str:
        return URL

    @contextmanager
    def lost(self, at: int, fate: Fate) -> Iterator[Calls]:
        calls = Calls(at, fate, OSError(5, "the store has failed"))

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(store: ObjectStore, url: Any, *args: Any) -> Any:
                return calls.run(lambda: call(store, url, *args))

            return run

        with pytest.MonkeyPatch.context() as patch:
            for name in ("read", "exists", "is_file", "names", "put", "create", "remove_files"):
                patch.setattr(ObjectStore, name, counted(getattr(ObjectStore, name)))
            yield calls


@pytest.mark.parametrize("fate", FATES)
def test_a_lost_request_loses_no_commit(fate: str) -> None:
    for at in range(2 + 4 * FATES.index(fate), 60, 16):
        assert walk(Requests(), at, fate) >= at
        STORE.store.clear()


@pytest.mark.parametrize("publishes", [False, True])
def test_a_second_publisher_attaches_before_each_request(publishes: bool) -> None:
    for at in itertools.count(1):
        if not overtake(Requests(), at, publishes=publishes):
            break
        STORE.store.clear()
    assert at > 2


@pytest.mark.long
@pytest.mark.parametrize("fate", FATES)
def test_no_lost_request_loses_a_commit(store: str, fate: str) -> None:
    for at in itertools.count(1):
        if walk(Requests(), at, fate) < at:
            break
        STORE.store.clear()
    assert at > 50


def test_a_commit_without_an_answer_stays(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower has read it before the publisher could look it up."""
    table, copy = items(), items()
    log = DeltaLog(URL)
    log.attach(table)
    follower = delta_log.follow(URL, copy)
    create, read = ObjectStore.create, ObjectStore.read

    def unanswered(of: ObjectStore, url: str, data: bytes) -> None:
        create(of, url, data)
        raise OSError(5, "the answer is lost")

    def down(of: ObjectStore, url: str, *args: int) -> bytes:
        if url.endswith(".delta"):
            raise OSError(5, "the store is down")
        return read(of, url, *args)

    step(table, 0)
    for name in ("create", "put"):
        monkeypatch.setattr(ObjectStore, name, unanswered)
    monkeypatch.setattr(ObjectStore, "read", down)
    assert log.publish() == 1
    with pytest.raises(OSError, match="the answer is lost"):
        log.flush()
    with pytest.raises(OSError, match="the store is down"):
        log.publish()
    assert (log.sequence, log.durable_sequence) == (0, 0)
    monkeypatch.setattr(ObjectStore, "read", read)
    assert follower.update() == 1
    monkeypatch.setattr(ObjectStore, "create", create)
    monkeypatch.setattr(ObjectStore, "put", create)
    step(table, 10)
    assert log.publish() == 2
    log.close()
    assert (log.sequence, log.durable_sequence) == (2, 2)
    assert follower.update() == 1
    assert content(copy, state=False) == content(table, state=False)


def test_a_store_that_was_emptied_is_noticed() -> None:
    table, copy = items(), items()
    log = DeltaLog(URL)
    log.attach(table)
    follower = delta_log.follow(URL, copy)
    step(table, 0)
    log.publish()
    log.flush()
    assert follower.update() == 1
    STORE.store.clear()
    step(table, 10)
    log.publish()
    with pytest.raises(errors.NewBaseNeededError, match="close it, and attach it again"):
        log.flush()
    log.close()
    log.attach(table)
    step(table, 20)
    log.publish()
    log.publish()
    log.close()
    with pytest.raises(errors.NewBaseNeededError, match="Load the base, and follow from there"):
        follower.update()
    assert delta_log.replay(URL, copy) == 2
    assert content(copy, state=False) == content(table, state=False)


def test_a_request_that_the_client_has_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    create = ObjectStore.create

    def repeated(store: ObjectStore, url: str, data: bytes) -> None:
        create(store, url, data)
        create(store, url, data)  # the first answer was lost

    table = items()
    with DeltaLog(URL) as log:
        log.attach(table)
        monkeypatch.setattr(ObjectStore, "create", repeated)
        step(table, 0)
        log.publish()
        log.flush()
    assert len(batches()) == 1


def test_increments_are_not_followed_at_a_url() -> None:
    table = items()
    checkpoint.record_changes(table)
    step(table, 0)
    checkpoint.save("memory://bucket/whole", table)
    step(table, 9)
    checkpoint.save("memory://bucket/more", table, since="memory://bucket/whole")
    with pytest.raises(ValueError, match="copy it to a local disk"):
        delta_log.follow("memory://bucket/more", table, base="memory://bucket/whole")


def test_the_store_offers_a_condition_only_if_it_is_obeyed() -> None:
    assert ObjectStore(STORE).offers_create
    hdfs = type("Hdfs", (fsspec.AbstractFileSystem,), {"protocol": "hdfs"})()
    assert not ObjectStore(hdfs).offers_create
