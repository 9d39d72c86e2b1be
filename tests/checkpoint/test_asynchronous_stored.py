"""Background saves of tables with rows on a disk, during training."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_content import same as same_values
from checkpoint_content import saved_content
from held_disk import HeldDisk, files_of, full, give_disk, held_disk
from record_dict import LEAST
from saved_models import differences
from seeding import seeded
from whole_model import WholeModel

import torch_dynemb as td
from torch_dynemb import checkpoint, ops
from torch_dynemb.ops.columns import StoreStat
from torch_dynemb.storage.tiers.pinned_rows import PinnedRows
from torch_dynemb.storage.tiers.ssd import SSDTiers

pytestmark = [
    pytest.mark.cpu_only("stores are read by the CPU"),
    pytest.mark.filterwarnings("ignore:a step needed:RuntimeWarning"),  # caches are the smallest
]

EVERY_PATH = pytest.mark.parametrize("io", ["io_uring", "threads"])
SEGMENT = 1 << 16
IDS = 2000  # about 17 segments


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDisk]:
    with held_disk(monkeypatch) as held:
        yield held


def bag_on(
    path: Path, *, io: str = "auto", disk: int | None = 60, name: str = "bag"
) -> td.DynamicEmbeddingBag:
    """Rows of 512 bytes, in files of 64 KiB; ``disk`` is how many there may be."""
    torch.manual_seed(5)
    return td.DynamicEmbeddingBag(
        120,
        mode="sum",
        name=name,  # with which and the seed rows begin
        optimizer=td.RowWiseAdagrad(lr=0.1),
        storage=td.SSDStore(
            path,
            cache=LEAST,
            segment=SEGMENT,
            disk=None if disk is None else disk * SEGMENT,
            io=io,
        ),
    )


def train(bag: td.DynamicEmbeddingBag, steps: range) -> None:
    """Train steps with batches that depend only on their numbers; ids are evicted and return."""
    for step in steps:
        generator = seeded(step)
        ids = torch.randint(0, IDS, (150, 2), generator=generator)
        bag(ids).square().sum().backward()
        bag.optimizer.step()
        bag.group.erase(0, torch.randint(0, IDS, (20,), generator=generator))
        bag.group.insert(0, torch.randint(0, IDS, (10,), generator=generator))  # never trained


def stat(bag: td.DynamicEmbeddingBag, column: StoreStat) -> int:
    tiers = bag.group.tables.tiers
    assert tiers is not None
    tiers.drain()
    return int(ops.store_stats(tiers.tensors.clock)[column])


@EVERY_PATH
def test_what_is_saved_is_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: HeldDisk, io: str
) -> None:
    """Rows are evicted, written again, collected, erased and reused before the save reads any."""
    if io not in ops_paths():
        pytest.skip("this kernel has no io_uring")
    model, twin = bag_on(tmp_path / "model", io=io), bag_on(tmp_path / "twin", io=io)
    for bag in (model, twin):
        train(bag, range(30))
    with monkeypatch.context() as patched:
        give_disk(patched)
        checkpoint.save(tmp_path / "stopped", twin)
    handle = checkpoint.save(tmp_path / "while training", model, asynchronous=True)
    disk.wait_until_reached()
    assert stat(model, StoreStat.PINNED_SEGMENTS) >= 15
    collected, written = (stat(model, of) for of in (StoreStat.COLLECTED, StoreStat.WRITES))
    train(model, range(30, 60))
    assert stat(model, StoreStat.COLLECTED) > collected
    assert stat(model, StoreStat.WRITES) > written + 60 * 120  # more than the disk has room for
    assert not handle.done()
    train(twin, range(30, 60))
    for of in (model.group.tables.rows.hyper, model.group.tables.rows.meta):
        of.fill_(1)  # initial values of untrained rows are of that step, too
    disk.let_go()
    handle.wait()
    assert stat(model, StoreStat.PINNED_SEGMENTS) == 0
    saved, stopped = (files_of(tmp_path / name) for name in ("while training", "stopped"))
    assert differences(saved, stopped) == []
    for of, like in ((of, getattr(twin.group.tables.rows, of)) for of in ("hyper", "meta")):
        getattr(model.group.tables.rows, of).copy_(like)
    ids = torch.arange(IDS)
    assert torch.equal(model.group.read(0, ids), twin.group.read(0, ids))


def ops_paths() -> set[str]:
    names = {ops.IoPath.URING: "io_uring", ops.IoPath.THREADS: "threads"}
    return {names[path] for path in ops.store_io_paths()}


def test_one_save_after_the_other_while_training_goes_on(tmp_path: Path) -> None:
    """None waits for the other's rows, and none keeps them."""
    model, twin = bag_on(tmp_path / "model"), bag_on(tmp_path / "twin")
    for k in range(3):
        for bag in (model, twin):
            train(bag, range(10 * k, 10 * k + 10))
        handle = checkpoint.save(tmp_path / "last", model, asynchronous=True)
        train(model, range(100 + k, 101 + k))
        handle.wait()
        assert stat(model, StoreStat.PINNED_SEGMENTS) == 0
        checkpoint.save(tmp_path / "stopped", twin)
        assert differences(files_of(tmp_path / "last"), files_of(tmp_path / "stopped")) == []
        train(twin, range(100 + k, 101 + k))


@pytest.mark.parametrize("only", [None, "counted", "sketched", "bag"])
def test_groups_with_stored_tables_and_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: HeldDisk, only: str | None
) -> None:
    store = td.SSDStore(tmp_path / "rows", cache=LEAST, segment=SEGMENT)
    storage = {name: store.within("tables") for name in ("scored", "counted", "sketched")}
    storage["bag"] = store.within("bag")
    model = WholeModel(storage={name: storage[name] for name in storage if only in (None, name)})
    model.train_steps(range(3))
    with monkeypatch.context() as patched:
        give_disk(patched)
        checkpoint.save(tmp_path / "stopped", model)
    handle = checkpoint.save(tmp_path / "while training", model, asynchronous=True)
    disk.wait_until_reached()
    model.train_steps(range(3, 6))
    disk.let_go()
    handle.wait()
    saved, stopped = (saved_content(tmp_path / name) for name in ("while training", "stopped"))
    assert same_values(saved, stopped)


def test_an_error_is_told_once_and_the_rows_are_let_go(tmp_path: Path, disk: HeldDisk) -> None:
    model = bag_on(tmp_path / "model")
    train(model, range(5))
    handle = checkpoint.save(tmp_path / "last", model, asynchronous=True)
    disk.wait_until_reached()
    assert stat(model, StoreStat.PINNED_SEGMENTS) > 0
    disk.let_go(full())
    with pytest.raises(OSError, match="No space left"):
        handle.wait()
    assert not (tmp_path / "last").exists()
    assert stat(model, StoreStat.PINNED_SEGMENTS) == 0
    train(model, range(5, 8))


def test_rows_are_unpinned_if_another_store_cannot_pin_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bags = torch.nn.ModuleList(bag_on(tmp_path / name, name=name) for name in ("one", "two"))
    for bag in bags:
        train(bag, range(3))
    pinned: list[SSDTiers] = []
    pin = SSDTiers.pin

    def pin_one(tiers: SSDTiers) -> PinnedRows:
        if pinned:
            raise RuntimeError("disk full")
        pinned.append(tiers)
        return pin(tiers)

    with monkeypatch.context() as patched:
        patched.setattr(SSDTiers, "pin", pin_one)
        with pytest.raises(RuntimeError, match="disk full"):
            checkpoint.save(tmp_path / "last", bags, asynchronous=True)
    assert [stat(bag, StoreStat.PINNED_SEGMENTS) for bag in bags] == [0, 0]
    assert not (tmp_path / "last").exists()
    checkpoint.save(tmp_path / "last", bags, asynchronous=True).wait()


def test_damage_is_told_by_the_save_and_by_nothing_else(tmp_path: Path, disk: HeldDisk) -> None:
    model = bag_on(tmp_path / "model")
    train(model, range(1))
    handle = checkpoint.save(tmp_path / "last", model, asynchronous=True)
    disk.wait_until_reached()
    model.group.erase(0, torch.arange(IDS))  # training does not read what is damaged
    for file in (tmp_path / "model/rows").glob("*/*"):
        data = bytearray(file.read_bytes())
        for offset in range(4096 + 100, len(data), 512):
            data[offset] ^= 1
        file.write_bytes(data)
    disk.let_go()
    with pytest.raises(RuntimeError, match=r"the record at .* is damaged"):
        handle.wait()
    assert stat(model, StoreStat.PINNED_SEGMENTS) == 0
    train(model, range(1, 4))


@pytest.mark.long
def test_a_save_outlives_its_model(tmp_path: Path, disk: HeldDisk) -> None:
    model = bag_on(tmp_path / "model")
    train(model, range(5))
    expected = model.group.read(0, torch.arange(IDS))
    handle = checkpoint.save(tmp_path / "last", model, asynchronous=True)
    disk.wait_until_reached()
    del model
    gc.collect()
    disk.let_go()
    handle.wait()
    gc.collect()
    other = bag_on(tmp_path / "model")  # the directory is free again
    checkpoint.load(tmp_path / "last", other)
    assert torch.equal(other.group.read(0, torch.arange(IDS)), expected)


def test_snapshots_stay_what_they_were(tmp_path: Path, disk: HeldDisk) -> None:
    model = bag_on(tmp_path / "model", disk=None)
    train(model, range(5))
    checkpoint.save_snapshot(model, "first")
    expected = model.group.read(0, torch.arange(IDS))
    train(model, range(5, 8))
    handle = checkpoint.save(tmp_path / "last", model, asynchronous=True)
    disk.wait_until_reached()
    for call in (
        lambda: checkpoint.load_snapshot(model),
        lambda: checkpoint.save_snapshot(model, "second"),
    ):
        with pytest.raises(RuntimeError, match=r"asynchronous save of .* has not ended yet"):
            call()
    disk.let_go()
    handle.wait()
    train(model, range(8, 40))
    checkpoint.load_snapshot(model)
    assert torch.equal(model.group.read(0, torch.arange(IDS)), expected)


def test_a_full_disk_says_that_a_save_goes_on(tmp_path: Path, disk: HeldDisk) -> None:
    model = bag_on(tmp_path / "model", disk=34)
    train(model, range(30))
    handle = checkpoint.save(tmp_path / "last", model, asynchronous=True)
    disk.wait_until_reached()
    with pytest.raises(RuntimeError, match=r"disk full: .*are an asynchronous save's: wait for it"):
        train(model, range(30, 200))
    disk.let_go()
    handle.wait()
    train(model, range(30, 60))


def test_the_copy_has_the_index_and_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bag_on(tmp_path / "model")
    train(model, range(30))
    rows = model.group.size(0)
    with monkeypatch.context() as patched:
        patched.setattr("torch_dynemb.ops.available_memory", lambda: 10)
        with pytest.raises(RuntimeError, match=r"asynchronous=True needs \d+ bytes") as told:
            checkpoint.save(tmp_path / "last", model, asynchronous=True)
    found = re.search(r"needs (\d+) bytes", str(told.value))
    assert found is not None
    needed = int(found[1]) - (52 << 20)  # buffers and windows
    assert 29 * rows < needed < 200 * rows  # of rows of 484 bytes
    assert stat(model, StoreStat.PINNED_SEGMENTS) == 0
    checkpoint.save(tmp_path / "last", model, asynchronous=True).wait()
