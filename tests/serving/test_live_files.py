"""Tables with rows in a file that take updates, against rows in a dict and trained models."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from publishing import INPUTS, answer, new_trainer, publish, train
from quick_packages import QUICK
from seeding import seeded
from test_following_packages import assert_same
from torch import Tensor, nn
from torch._inductor import config

import torch_dynemb as td
from torch_dynemb import delta_log, ops, serving
from torch_dynemb.errors import DamagedStoreError, ForkedProcessError, InUseError
from torch_dynemb.serving.packages.manifest import DENSE, TABLES, read_package_manifest

if TYPE_CHECKING:
    from conftest import Package

pytestmark = pytest.mark.cpu_only("the CPU reads files")

DIMS = {"a": 8, "b": 8, "c": 6}
IDS, PADDING, HEADROOM = 400, 5, 60
OFF = {None: 0.0, "bf16": 2**-8, "int8": 8 / 255, "int4": 8 / 15, "fp8": 2**-4}


class Twin:
    """Live tables with rows in a file, and their rows in dicts."""

    def __init__(self, folder: Path, *, rows: Any = None, headroom: int = HEADROOM) -> None:
        self.random = seeded(3)
        bags = td.DynamicEmbeddingBagCollection(
            [
                td.TableConfig("a", 8, initializer=td.Constant(0.5)),
                td.TableConfig("b", 8, padding_idx=PADDING, eval_default="zeros"),
                td.TableConfig("c", 6),
            ],
            optimizer=td.SGD(lr=0.1),
        )
        self.rows: dict[str, dict[int, Tensor]] = {}
        for name, dim in DIMS.items():
            ids = torch.cat([torch.arange(100, 100 + IDS), torch.tensor([0, -1, -(2**63)])])
            values = self.draw(len(ids), dim)
            bags.group.insert_or_assign(name, ids, values)
            self.rows[name] = dict(zip(ids.tolist(), values, strict=True))
        storage = td.SSDStore(folder / "rows", cache="64 rows")
        self.frozen = td.freeze(bags, rows=rows, storage=storage)
        self.model = serving.live(self.frozen, headroom=headroom)
        self.tables: Any = self.model.frozen_tables
        self.off = OFF[rows]

    def draw(self, count: int, dim: int) -> Tensor:
        values = torch.randn(count, dim, generator=self.random).clamp(-4, 4)
        return values.contiguous()

    def pick(self, name: str, count: int) -> Tensor:
        """Ids that are there or were, and new ones."""
        return torch.randint(80, 120 + IDS, (count,), generator=self.random)

    def update(self, name: str, ids: Tensor, values: Tensor, erased: Tensor) -> Any:
        """What the update should count, after it was made here and there."""
        rows, given = self.rows[name], set(ids.tolist())
        gone = {id for id in erased.tolist() if id in rows and id not in given}
        fresh = {id for id in given if id not in rows}
        done = self.tables.update(name, ids, values, erased=erased)
        assert done == (len(fresh), len(ids) - len(fresh), len(gone))
        rows |= dict(zip(ids.tolist(), values, strict=True))
        for id in gone:
            del rows[id]

    def check(self) -> None:
        for name, rows in self.rows.items():
            assert self.tables.sizes()[name] == len(rows)
            ids = torch.tensor([*rows], dtype=torch.int64)
            ids = ids[torch.randperm(len(rows), generator=self.random)]
            found = self.read(name, ids)
            expected = torch.stack([rows[id] for id in ids.tolist()]) if rows else found
            assert rows == {} or (found - expected).abs().max() <= self.off * max(1, self.off and 4)
            absent = torch.arange(80, 120 + IDS)
            absent = absent[~torch.isin(absent, ids)]
            default = 0.5 if name == "a" else None
            if default is not None:
                assert bool((self.read(name, absent) == default).all())
            assert self.missing(name, absent) == len(absent)

    def missing(self, name: str, ids: Tensor) -> int:
        tables = self.tables.get_buffer
        batch = ops.LookupBatch.of_rows(ids, ids[:0], [[*DIMS].index(name)], DIMS[name])
        names = ("file", "tables", "meta", "init_data")
        return int(ops.file_lookup(*(tables(of) for of in names), batch).missing.sum())

    def read(self, name: str, ids: Tensor) -> Tensor:
        batch = ops.LookupBatch.of_rows(ids, ids[:0], [[*DIMS].index(name)], DIMS[name])
        found: Tensor = self.tables.lookup(batch)
        return found


@pytest.fixture
def twin(tmp_path: Path) -> Twin:
    return Twin(tmp_path)


def unnamed_files(folder: Path) -> int:
    """Files of this process that have no name any more."""
    gc.collect()
    opened = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    found = [os.readlink(of) for of in opened if os.path.islink(of)]
    return sum(of.startswith(f"{folder}/") and of.endswith(" (deleted)") for of in found)


@pytest.mark.parametrize("rows", [None, "bf16", "int8", "int4", "fp8"])
def test_updates_beyond_the_headroom(tmp_path: Path, rows: Any) -> None:
    twin = Twin(tmp_path, rows=rows)
    before = {name: twin.read(name, torch.tensor([*of])) for name, of in twin.rows.items()}
    ids = {name: torch.tensor([*of]) for name, of in twin.rows.items()}
    for step in range(24):
        name = [*DIMS][step % 3]
        given = twin.pick(name, 50)
        given[-1] = given[0]  # the last row counts
        erased = torch.cat([twin.pick(name, 40), given[:3]])
        twin.update(name, given, twin.draw(50, DIMS[name]), erased)
        if step % 4 == 3:
            twin.check()
    stats = twin.tables.stats()
    assert stats.files > 4
    assert stats.hits > 0 < stats.misses
    assert [of.name for of in (tmp_path / "rows").iterdir()] == ["tables0.rows"]
    assert unnamed_files(tmp_path) == 1
    assert twin.tables.version().updates == dict.fromkeys(DIMS, 8)
    frozen: Any = twin.frozen.frozen_tables  # another use of the file
    for number, (name, dim) in enumerate(DIMS.items()):
        batch = ops.LookupBatch.of_rows(ids[name], ids[name][:0], [number], dim)
        assert torch.equal(frozen.lookup(batch), before[name])
    del twin, frozen
    assert unnamed_files(tmp_path) == 0


def test_ids_that_go_and_come_back(twin: Twin) -> None:
    one, none = torch.tensor([150]), torch.tensor([], dtype=torch.int64)
    new = torch.tensor([7000])
    for _ in range(3):
        for ids in (one, new):
            twin.update("a", ids, twin.draw(1, 8), none)
            twin.check()
            twin.update("a", none, twin.draw(0, 8), ids)
            twin.check()
            assert twin.tables.erase("a", ids) == 0
        twin.update("a", torch.cat([one, new]), twin.draw(2, 8), torch.cat([new, one]))
        twin.check()
        for begin in (200, 255):  # the second one writes the file anew
            twin.update("a", torch.arange(begin, begin + 55), twin.draw(55, 8), none)
    assert twin.tables.stats().files >= 3


def test_all_ids_go_and_more_than_before_come(tmp_path: Path) -> None:
    twin = Twin(tmp_path, headroom=1000)
    none = torch.tensor([], dtype=torch.int64)
    twin.update("c", none, twin.draw(0, 6), torch.tensor([*twin.rows["c"]]))
    twin.check()
    for step in range(6):
        twin.update("c", torch.arange(900) + 1000 * step, twin.draw(900, 6), none)
    twin.check()
    assert twin.tables.sizes()["c"] == 5400
    assert twin.tables.stats().files == 5


def test_threads_read_while_the_file_is_written_anew(tmp_path: Path) -> None:
    twin = Twin(tmp_path)
    lasting, others = torch.arange(100, 300), torch.arange(300, 500)
    version = torch.zeros(500)
    twin.tables.update("a", lasting[:60], torch.zeros(60, 8))
    for begin in range(0, 200, 50):
        twin.tables.update("a", lasting[begin : begin + 50], torch.zeros(50, 8))
    stop, faults, reads = threading.Event(), list[str](), [0]

    def read() -> None:
        last = torch.zeros(200)
        while not stop.is_set() and not faults:
            least = version[100:300].clone()
            rows = twin.read("a", lasting)
            reads[0] += 1
            if not bool((rows == rows[:, :1]).all()):
                faults.append("a row of two versions, or the default of a missing id")
            if bool((rows[:, 0] < last).any()) or bool((rows[:, 0] < least).any()):
                faults.append("a row older than one that was read, or than an update that ended")
            last = rows[:, 0]
            twin.read("a", others)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for step in range(1, 40):
            ids = lasting[torch.randperm(200)[:40]]
            erased = others[torch.randperm(200)[:20]]
            twin.tables.update("a", ids, torch.full((40, 8), float(step)), erased=erased)
            twin.tables.update("a", erased[:10], twin.draw(10, 8))
            version[ids] = float(step)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not faults
    assert twin.tables.stats().files > 10
    assert reads[0] > 10


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_changes_nothing(twin: Twin, tmp_path: Path) -> None:
    none = torch.tensor([], dtype=torch.int64)
    twin.update("b", torch.arange(300, 350), twin.draw(50, 8), none)
    with (
        largest_file(4096),
        pytest.raises(RuntimeError, match=r"writing the rows anew .*too large"),
    ):
        twin.tables.update("b", torch.arange(400, 450), twin.draw(50, 8))
    twin.check()
    assert unnamed_files(tmp_path) == 0
    twin.update("b", torch.arange(400, 450), twin.draw(50, 8), none)
    twin.check()


def test_wrong_updates_change_nothing(twin: Twin) -> None:
    tables, rows = twin.tables, twin.draw(61, 8)
    none = torch.tensor([], dtype=torch.int64)
    twin.update("a", torch.arange(300, 350), twin.draw(50, 8), none)
    with pytest.raises(serving.NoHeadroomError, match=r"'a' keeps changes of 60 ids.* removes 61"):
        tables.update("a", torch.arange(100, 161), rows)
    with pytest.raises(serving.NoHeadroomError, match=r"'a' keeps changes of 60 ids.* removes 70"):
        tables.erase("a", torch.arange(100, 170))
    assert tables.stats().files == 0  # a file with the changes would not help
    with pytest.raises(RuntimeError, match="the padding id of table 'b'"):
        tables.update("b", torch.tensor([1, PADDING]), rows[:2])
    with pytest.raises(ValueError, match=r"rows has shape \(2, 8\), expected \(2, 6\)"):
        tables.update("c", torch.tensor([1, 2]), rows[:2])
    with pytest.raises(ValueError, match="'d'"):
        tables.update("d", torch.tensor([1]), rows[:1])
    twin.check()
    assert tables.erase("a", torch.arange(5000, 5100)) == 0  # none is there
    for of in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="live tables with rows in a file cannot be copied"):
            of(twin.model)
    with pytest.raises(ValueError, match=r"live: rows is 'int8', but tables .* in a file"):
        serving.live(twin.frozen, headroom=5, rows="int8")
    with pytest.raises(NotImplementedError, match="do not list ids that change"):
        tables.ids("a")
    assert twin.model.state_dict() == {}


def test_rows_that_a_format_cannot_hold(tmp_path: Path) -> None:
    twin = Twin(tmp_path, rows="int8")
    rows = twin.draw(2, 8)
    rows[1, 3] = float("nan")
    with pytest.raises(RuntimeError, match=r"values\[1\], the row of id 9, has NaN"):
        twin.tables.update("a", torch.tensor([8, 9]), rows)
    twin.check()


def test_writers_take_turns(twin: Twin) -> None:
    def write(number: int) -> None:
        for step in range(20):
            ids = torch.arange(30) + 10_000 * number + 10 * step
            twin.tables.update("a", ids, torch.full((30, 8), float(number)))

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(write, number) for number in (1, 2, 3)]:
            done.result()
    assert twin.tables.sizes()["a"] == len(twin.rows["a"]) + 3 * 220
    for number in (1, 2, 3):
        rows = twin.read("a", torch.arange(220) + 10_000 * number)
        assert bool((rows == number).all())


def test_an_op_beside_another_one_is_refused(tmp_path: Path) -> None:
    """The module has its threads wait; programs that call the op find out."""
    twin = Twin(tmp_path, headroom=4000)
    file, none = twin.tables.get_buffer("file"), torch.tensor([], dtype=torch.int64)
    refused = list[InUseError]()

    def write() -> None:
        while not refused:
            try:
                ops.file_apply(file, 0, torch.arange(3000), torch.ones(3000, 8), none)
            except InUseError as error:
                refused.append(error)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(write) for _ in range(2)]:
            done.result(60)
    assert "let the threads take turns" in str(refused[0])


def test_the_cache_grows_with_the_tables(tmp_path: Path) -> None:
    bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), name="ads")
    storage = td.SSDStore(tmp_path / "rows", cache="1MB")
    model = serving.live(td.freeze(bag, storage=storage), headroom=500)
    for begin in range(0, 4000, 500):
        ids = torch.arange(begin, begin + 500)
        model.frozen_tables.update("ads", ids, ids[:, None].expand(500, 4).float())
    asked = torch.arange(3000)[:, None]
    for _ in range(2):
        before = model.frozen_tables.stats()
        assert torch.equal(model(asked), asked.expand(3000, 4).float())
    after = model.frozen_tables.stats()
    assert after.misses - before.misses < 2000


def test_a_damaged_row_stays_an_error_until_it_is_updated(tmp_path: Path) -> None:
    twin = Twin(tmp_path)
    row = twin.rows["c"][130].numpy().tobytes()
    (path,) = (tmp_path / "rows").iterdir()
    data = bytearray(path.read_bytes())
    data[data.index(row)] ^= 1
    path.write_bytes(data)
    for begin in (200, 250, 300):
        twin.tables.update("c", torch.arange(begin, begin + 50), twin.draw(50, 6))
    assert twin.tables.stats().files > 0
    with pytest.raises(DamagedStoreError, match=r"the row of id 130 in table 'c'.* has changed it"):
        twin.read("c", torch.arange(120, 140))
    twin.tables.update("c", torch.tensor([130]), torch.ones(1, 6))
    assert bool((twin.read("c", torch.tensor([130])) == 1).all())


def test_programs_read_updates(twin: Twin) -> None:
    given = {name: torch.arange(100, 140).reshape(4, 10) for name in DIMS}
    program = torch.export.export(twin.model, (given,)).module()
    none = torch.tensor([], dtype=torch.int64)
    for _ in range(3):
        twin.update("a", torch.arange(100, 150), twin.draw(50, 8), none)
        assert torch.equal(program(given), twin.model(given))
        expected = torch.stack([twin.rows["a"][id] for id in range(100, 140)])
        found = program(given)[:, :8]
        assert torch.allclose(found, expected.reshape(4, 10, 8).sum(1), atol=1e-5)
    file = twin.tables.get_buffer("file").clone()
    del twin.model, twin.tables
    gc.collect()
    with pytest.raises(RuntimeError, match="live tables of another process, or of a model that is"):
        ops.file_counts(file, 3)
    del program


def test_a_forked_process_makes_tables_of_its_own(twin: Twin) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            twin.tables.sizes()
        except ForkedProcessError:
            os.write(writer, b"refused")
        finally:
            os._exit(0)
    os.close(writer)
    assert os.read(reader, 100) == b"refused"
    os.close(reader)
    os.waitpid(child, 0)
    twin.check()


# -- delta logs ----------------------------------------------------------------------------------


def test_a_model_follows_a_log(tmp_path: Path) -> None:
    bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.Adagrad(lr=0.1), name="ads")
    ids = torch.arange(300)
    bag(ids[:, None])
    log = delta_log.DeltaLog(tmp_path / "log")
    log.attach(bag)
    served = serving.live(td.freeze(bag, storage=td.SSDStore(tmp_path / "rows")), headroom=64)
    follower = delta_log.follow(tmp_path / "log", served)
    with log:
        for step in range(12):
            bag.zero_grad()
            bag(torch.randint(0, 400, (30, 2))).square().sum().backward()
            bag.optimizer.step()
            bag.group.erase("ads", torch.arange(10 * step, 10 * step + 5))
            log.publish()
            log.flush()
            assert follower.update() == 1
            asked = torch.arange(420)[:, None]
            assert torch.equal(served(asked), td.freeze(bag)(asked))
        assert served.frozen_tables.stats().files > 3
        bag.group.insert_or_assign("ads", torch.arange(500, 600), torch.ones(100, 4))
        log.publish()
        log.flush()
        with pytest.raises(serving.NoHeadroomError, match="keeps changes of 64 ids in memory"):
            follower.update()
        assert follower.sequence == 12


class Trained:
    """A trainer of the tables of a twin, which follows its log."""

    def __init__(self, twin: Twin, folder: Path) -> None:
        self.twin = twin
        self.bags = td.DynamicEmbeddingBagCollection(
            [td.TableConfig(name, dim) for name, dim in DIMS.items()], optimizer=td.SGD(lr=0.1)
        )
        for name, rows in twin.rows.items():
            ids = torch.tensor([*rows])
            self.bags.group.insert_or_assign(name, ids, torch.stack([*rows.values()]))
        self.log = delta_log.DeltaLog(folder / "log")
        self.log.attach(self.bags)
        self.follower = delta_log.follow(folder / "log", twin.model)

    def commit(self, changed: dict[str, Tensor], removed: dict[str, Tensor]) -> None:
        """Publish rows of ids and removals, and keep what the twin has after it."""
        self.after = {name: dict(rows) for name, rows in self.twin.rows.items()}
        for name, ids in changed.items():
            rows = self.twin.draw(len(ids), DIMS[name])
            self.bags.group.insert_or_assign(name, ids, rows)
            self.after[name] |= dict(zip(ids.tolist(), rows, strict=True))
        for name, ids in removed.items():
            self.bags.group.erase(name, ids)
            for id in ids.tolist():
                self.after[name].pop(id, None)
        self.log.publish()
        self.log.flush()

    def take(self) -> None:
        self.follower.update()
        self.twin.rows = self.after
        self.twin.check()


@pytest.fixture
def trained(twin: Twin, tmp_path: Path) -> Iterator[Trained]:
    trained = Trained(twin, tmp_path)
    with trained.log:
        yield trained


@pytest.mark.parametrize("full", [*DIMS])
def test_a_commit_that_finds_no_disk_leaves_all_tables(trained: Trained, full: str) -> None:
    """One table has no room in memory; the others have room for the commit, and not for more."""
    twin, none = trained.twin, torch.tensor([], dtype=torch.int64)
    twin.update(full, torch.arange(300, 350), twin.draw(50, DIMS[full]), none)
    changed = {name: torch.arange(100, 140 + number) for number, name in enumerate(DIMS)}
    trained.commit(changed, {name: torch.arange(180, 220) for name in DIMS})
    for _ in range(2):
        with largest_file(4096), pytest.raises(RuntimeError, match="too large"):
            trained.follower.update()
        twin.check()
        assert trained.follower.sequence == 0
    trained.take()
    trained.commit({"b": torch.arange(10, 70)}, {"a": torch.arange(100, 150)})
    trained.take()


def test_another_thread_updates_beside_a_follower(trained: Trained) -> None:
    twin, stop = trained.twin, threading.Event()
    other = torch.arange(9000, 9030)

    def write() -> None:
        while not stop.is_set():
            twin.tables.update("a", other, torch.full((30, 8), 7.0))

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        try:
            for step in range(10):
                ids = torch.randperm(IDS)[:50] + 100
                trained.commit(dict.fromkeys(DIMS, ids), {"b": torch.arange(10) + 700 + step})
                trained.follower.update()
                twin.rows = trained.after
        finally:
            stop.set()
        writer.result()
    twin.rows["a"] |= dict.fromkeys(other.tolist(), torch.full((8,), 7.0))
    twin.check()


def test_the_model_runs_while_a_commit_is_written(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = trained.twin
    given = {name: torch.arange(100, 140).reshape(4, 10) for name in DIMS}
    before, ran = twin.model(given), list[Tensor]()
    room = ops.file_room

    def slow(*arguments: Any, write: bool) -> Any:
        if write:  # another thread, which takes no turn of this one
            with ThreadPoolExecutor(1) as pool:
                ran.append(pool.submit(twin.model, given).result(60))
        return room(*arguments, write=write)

    monkeypatch.setattr(ops, "file_room", slow)
    trained.commit({"a": torch.arange(100, 120)}, {})
    trained.take()
    assert torch.equal(ran[0], before)
    assert not torch.equal(twin.model(given), before)


def test_commits_of_ids_that_are_not_there_and_of_damaged_rows(
    trained: Trained, tmp_path: Path
) -> None:
    twin = trained.twin
    many = torch.arange(50_000, 50_000 + 2 * HEADROOM)
    for _ in range(2):
        trained.bags.group.insert_or_assign("a", many, torch.ones(len(many), 8))
        trained.bags.group.erase("a", many)
        trained.commit({"c": torch.arange(100, 110)}, {})
        trained.take()
    row = twin.rows["c"][130].numpy().tobytes()
    (path,) = (tmp_path / "rows").iterdir()
    data = bytearray(path.read_bytes())
    data[data.index(row)] ^= 1
    path.write_bytes(data)
    trained.commit({"a": torch.arange(200, 250), "c": torch.tensor([130])}, {})
    trained.take()


# -- packages ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("dense", ["follow", "keep"])
def test_a_package_with_files_follows(
    file_package: Package, tmp_path: Path, dense: delta_log.Dense
) -> None:
    model, publisher = new_trainer(file_package, tmp_path / "log")
    with (
        publisher,
        serving.load(
            file_package.path, follow=tmp_path / "log", dense=dense, cache="20 rows"
        ) as served,
        serving.load(file_package.path) as other,
    ):
        first, uses = answer(model), 0
        for number in range(1, 8):
            train(model, number, dense=dense == "follow")
            publish(publisher)
            assert served.follower.update() == 1
            assert_same(served, model)
            (stats,) = served.row_files().values()
            assert stats.hits + stats.misses > uses
            uses = stats.hits + stats.misses
            assert torch.equal(other.run(*INPUTS)[0], first[0])
        assert stats.files > 0
        assert served.stats()["bags.u"].ids == model.bags.group.size(0)
        served.apply("bags.u", torch.tensor([3]), torch.ones(1, 8))
        assert served.erase("bags.u", torch.tensor([3])) == 1
        with pytest.raises(
            ValueError, match=r"shared_memory is .* rows of the package lie in files"
        ):
            serving.load(file_package.path, shared_memory=tmp_path)
    assert unnamed_files(file_package.path) == 0
    live = serving.live(file_package.frozen, headroom=5)
    serving.live_tables(live)["bags.frozen_tables"].erase("u", torch.tensor([1]))
    with pytest.raises(RuntimeError, match="which lacks their updates: export the frozen model"):
        serving.export(live, tmp_path / "no", INPUTS)


class Twice(nn.Module):
    """A model with one module under two names."""

    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        self.first = bag
        self.second = self.first

    def forward(self, ids: Tensor) -> Tensor:
        return self.first(ids) + self.second(ids + 1)  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("in_file", [False, True])
def test_updates_of_a_module_with_two_names_arrive(tmp_path: Path, in_file: bool) -> None:
    bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), name="ads")
    bag.group.insert_or_assign("ads", torch.arange(50), torch.randn(50, 4))
    storage = td.SSDStore(tmp_path / "rows") if in_file else None
    frozen = td.freeze(Twice(bag), storage=storage)
    asked = torch.tensor([[3], [7]])
    with config.patch(QUICK):
        serving.export(frozen, tmp_path / "package", (asked,), headroom=10)
    manifest = read_package_manifest(tmp_path / "package")
    for name, file in manifest.constants.items():
        assert file == (TABLES if "frozen_tables" in name else DENSE)
    with serving.load(tmp_path / "package") as served:
        (name,) = served.stats()
        served.apply(name, torch.tensor([3, 4, 7, 8]), torch.ones(4, 4))
        assert torch.equal(served.run(asked), torch.full((2, 4), 2.0))
