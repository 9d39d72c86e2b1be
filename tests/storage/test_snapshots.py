"""Snapshots: training goes on from them bit for bit, and what does not fit is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_training import IDS, StoredModel, on_a_gpu

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.files.disk import Disk

pytestmark = pytest.mark.cpu_only("stores on disks are the CPU's")

SAVE = sys.modules["torch_dynemb.checkpoint.snapshots.save"]
STEPS = 16


@pytest.fixture(scope="module")
def losses() -> list[str]:
    """Of training without a break, with all rows in memory."""
    return StoredModel(None).train_steps(STEPS)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def goes_on(model: StoredModel, losses: list[str], steps: int) -> None:
    assert model.steps == steps
    assert model.train_steps(STEPS - steps) == losses[steps:]


# -- going on ------------------------------------------------------------------------------------


@pytest.mark.long_cases("io_uring-gpu", "threads-gpu")
@pytest.mark.parametrize("place", ["cpu", "gpu"])
@pytest.mark.parametrize("io", ["io_uring", "threads"])
def test_goes_on_bit_for_bit_in_the_same_process_and_in_another(
    io: str, place: str, tmp_path: Path, losses: list[str]
) -> None:
    with on_a_gpu() if place == "gpu" else nullcontext():
        check_that_it_goes_on(io, tmp_path, losses)


def check_that_it_goes_on(io: str, tmp_path: Path, losses: list[str]) -> None:
    if io == "io_uring" and td.ops.store_io_paths()[0] != td.ops.IoPath.URING:
        pytest.skip("the build or the kernel has no io_uring")
    model = StoredModel(tmp_path, io=io)
    assert model.train_steps(5) == losses[:5]
    model.save("a")
    values = model.values()
    assert model.train_steps(4) == losses[5:9]
    assert model.load() == 5
    assert torch.equal(model.values(), values)
    goes_on(model, losses, 5)
    last = model.values()
    del model
    other = StoredModel(tmp_path, io=io)
    assert other.load("a") == 5
    goes_on(other, losses, 5)
    assert torch.equal(other.values(), last)


def test_nothing_but_time_passes_when_a_snapshot_is_made(tmp_path: Path, losses: list[str]) -> None:
    model = StoredModel(tmp_path)
    for step in range(6):
        assert model.step() == losses[step]
        model.save("last")
    assert checkpoint.snapshots(model) == ["last"]
    index = tmp_path / "index"
    assert len(list(index.iterdir())) == 1


def test_a_snapshot_writes_only_what_has_changed(tmp_path: Path) -> None:
    model = StoredModel(tmp_path)
    model.train_steps(10)
    model.save("a")
    before = model.users.group.usage.storage()
    model.save("b")
    after = model.users.group.usage.storage()
    assert before is not None
    assert after is not None
    assert after.bytes_written == before.bytes_written


def test_every_optimizer_state_and_dtype_goes_on(tmp_path: Path) -> None:
    optimizer = td.RowWiseAdagrad(lr=0.1)

    def model(path: Path | None) -> td.DynamicEmbedding:
        torch.manual_seed(3)
        storage = None if path is None else td.SSDStore(path, cache="64 rows", segment="64KiB")
        return td.DynamicEmbedding(
            5, optimizer=optimizer, dtype=torch.bfloat16, name="t", storage=storage
        )

    def train(table: td.DynamicEmbedding, steps: range) -> None:
        for step in steps:
            table(torch.arange(40) + 10 * step).float().square().sum().backward()
            table.optimizer.step()

    table, expected = model(tmp_path), model(None)
    train(expected, range(12))
    train(table, range(6))
    checkpoint.save_snapshot(table, "half")
    del table
    table = model(tmp_path)
    checkpoint.load_snapshot(table)
    train(table, range(6, 12))
    for module in (table, expected):
        module.eval()
    for ids in torch.arange(200).split(40):
        assert torch.equal(table(ids), expected(ids))


def test_a_step_that_has_begun_is_refused(tmp_path: Path) -> None:
    table = td.DynamicEmbedding(
        4, optimizer=td.Adam(lr=0.1), split=True, storage=td.SSDStore(tmp_path, segment="64KiB")
    )
    table(torch.arange(8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"save_snapshot: .* gradients pending.*step\(\)"):
        checkpoint.save_snapshot(table, "a")
    table.optimizer.step()
    checkpoint.save_snapshot(table, "a")


def test_a_backward_after_a_snapshot_loses_nothing(tmp_path: Path) -> None:
    storage = td.SSDStore(tmp_path, segment="64KiB", cache="64 rows")
    options: Any = {"optimizer": td.SGD(lr=0.5), "initializer": td.Constant(0.0)}
    table = td.DynamicEmbedding(4, storage=storage, **options)
    rows = table(torch.arange(8))
    checkpoint.save_snapshot(table, "forward")
    rows.sum().backward()
    table.optimizer.step()
    for ids in torch.arange(8, 408).split(40):  # the cache has no room left for those of above
        table(ids).sum().backward()
        table.optimizer.step()
    table.eval()
    assert torch.equal(table(torch.arange(8)), torch.full((8, 4), -0.5))
    checkpoint.load_snapshot(table)
    assert torch.equal(table(torch.arange(8)), torch.zeros(8, 4))


def test_evicted_ids_that_nobody_has_taken_come_back(tmp_path: Path) -> None:
    def model() -> td.DynamicEmbedding:
        torch.manual_seed(0)
        storage = td.SSDStore(tmp_path, cache="64 rows", segment="64KiB")
        policy = td.Policy(score="step", capacity=64)
        table = td.DynamicEmbedding(
            4, optimizer=td.SGD(lr=0.1), policy=policy, name="t", storage=storage
        )
        table.group.evicted.record(500)
        return table

    table = model()
    for step in range(6):
        table(torch.arange(32) + 32 * step).sum().backward()
        table.optimizer.step()
    checkpoint.save_snapshot(table, "a")
    taken = table.group.evicted.take()["t"]
    assert taken.ids.numel() > 0
    checkpoint.load_snapshot(table)
    again = table.group.evicted.take()["t"]
    assert torch.equal(again.ids, taken.ids)
    assert torch.equal(again.scores, taken.scores)
    table.group.evicted.record(3)
    with pytest.raises(RuntimeError, match=r"pending evicted ids.*evicted\.record\("):
        checkpoint.load_snapshot(table)


# -- names, and which stay -----------------------------------------------------------------------


def test_as_many_stay_as_asked_for(tmp_path: Path, losses: list[str]) -> None:
    model = StoredModel(tmp_path)
    for step in range(1, 7):
        model.step()
        model.save(f"step-{step}", keep=3)
    assert checkpoint.snapshots(tmp_path) == ["step-4", "step-5", "step-6"]
    model.load("step-4")
    goes_on(model, losses, 4)
    model.load("step-6")
    goes_on(model, losses, 6)


def test_a_name_is_used_again_for_the_tables_that_gave_it(
    tmp_path: Path, losses: list[str]
) -> None:
    model = StoredModel(tmp_path)
    model.train_steps(3)
    model.save("last", keep=2)
    model.train_steps(3)
    model.save("last", keep=2)
    assert checkpoint.snapshots(model) == ["last"]
    assert model.load() == 6
    goes_on(model, losses, 6)


def test_snapshots_of_another_run_stay(tmp_path: Path, losses: list[str]) -> None:
    first = StoredModel(tmp_path)
    first.train_steps(4)
    first.save("last")
    del first
    second = StoredModel(tmp_path)
    second.train_steps(7)
    with pytest.raises(FileExistsError, match=r"'last' that the tables do not continue.*delete"):
        second.save("last")
    second.save("other")
    second.train_steps(3)
    second.save("third")
    assert checkpoint.snapshots(second) == ["last", "third"]
    assert second.load("last") == 4
    goes_on(second, losses, 4)
    second.save("last")
    assert checkpoint.snapshots(second) == ["third", "last"]


def test_who_deletes_the_file_has_deleted_the_snapshot(tmp_path: Path, losses: list[str]) -> None:
    model = StoredModel(tmp_path)
    model.train_steps(4)
    model.save("a", keep=2)
    model.train_steps(4)
    model.save("b", keep=2)
    (tmp_path / "snapshots" / "b").unlink()
    assert checkpoint.snapshots(model) == ["a"]
    model.save("c", keep=2)
    assert len(list((tmp_path / "index").iterdir())) == 2
    assert model.load("a") == 4
    goes_on(model, losses, 4)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "x" * 101])
def test_names_are_those_of_files(name: str, tmp_path: Path) -> None:
    model = StoredModel(tmp_path)
    with pytest.raises(ValueError, match=r"save_snapshot: name is .*expected 1 to 100 letters"):
        model.save(name)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    model = StoredModel(tmp_path)
    with pytest.raises(TypeError, match="save_snapshot: name is"):
        checkpoint.save_snapshot(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="save_snapshot: keep_last is 0"):
        model.save("a", keep=0)
    with pytest.raises(FileNotFoundError, match=r"has no snapshot: it has \[\]"):
        model.load()
    model.save("a")
    with pytest.raises(FileNotFoundError, match=r"has no snapshot 'b': it has \['a'\]"):
        model.load("b")
    for call in (lambda m: checkpoint.save_snapshot(m, "a"), checkpoint.load_snapshot):
        with pytest.raises(RuntimeError, match=r"no table of the model has storage=SSDStore"):
            call(torch.nn.Linear(2, 2))
        with pytest.raises(TypeError, match="model is"):
            call(3)


# -- what does not fit ---------------------------------------------------------------------------


def unchanged(model: StoredModel, name: str | None, match: str) -> None:
    """A load raises, and the model is as it was."""
    values = model.values()
    with pytest.raises(RuntimeError, match=match):
        model.load(name)
    assert torch.equal(model.values(), values)


def test_a_snapshot_of_other_tables_is_refused(tmp_path: Path) -> None:
    model = StoredModel(tmp_path)
    model.train_steps(3)
    model.save("a")
    del model
    torch.manual_seed(7)
    other = td.DynamicEmbedding(
        24,
        name="users",
        optimizer=td.Adam(lr=0.05),
        storage=td.SSDStore(tmp_path, segment="64KiB"),
    )
    with pytest.raises(RuntimeError, match=r"saved with .* but this module has.*construct"):
        checkpoint.load_snapshot(other)
    other(torch.arange(10)).sum().backward()  # it is as it was
    other.optimizer.step()
    assert other.group.size(0) == 10


Damage = Callable[[Path], None]


def flip(offset: int) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    return damage


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def other_version(path: Path) -> None:
    content = json.loads(path.read_bytes())
    content["version"] = 99
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "damage", "match"),
    [
        ("snapshots/b", flip(9), "snapshots/b: "),
        ("snapshots/b", other_version, "snapshots/b: it has version 99 .* reads 1"),
        ("index/*/manifest.json", flip(200), "manifest.json: "),
        ("index/*/manifest.json", other_version, "manifest.json: it has version 99 .* reads 1"),
        ("index/*/manifest.json", Path.unlink, "manifest.json: the file is missing"),
        ("index/*/state.safetensors", flip(5000), "state.safetensors: block 0 .*checksum"),
        ("index/*/state.safetensors", cut, "state.safetensors: the file has .* bytes, expected"),
        ("index/*/state.safetensors", Path.unlink, "state.safetensors: the file is missing"),
        ("rows/*/????????", flip(20), "rows/.*: the first page is damaged"),
        ("rows/*/????????", cut, "rows/.*: the file has .* bytes, expected 65536"),
        ("rows/*/????????", Path.unlink, "rows/.*: the file is missing"),
        ("index/*/model/manifest.json", flip(50), "manifest.json: "),
        ("index/*/model/*/ads/*", flip(4200), "safetensors: block"),
        ("index/*/model/*/dense/*", cut, "safetensors: the file has"),
    ],
)
def test_damage_is_told_before_anything_changes(
    file: str, damage: Damage, match: str, tmp_path: Path
) -> None:
    model = StoredModel(tmp_path)
    model.train_steps(4)
    model.save("b")
    model.train_steps(1)
    found = sorted(tmp_path.glob(file))
    assert found
    if file.startswith("rows"):  # of the snapshot, which says which they are
        (manifest,) = tmp_path.glob("index/*/manifest.json")
        numbers = json.loads(manifest.read_bytes())["segments"][0]["files"]
        found = [path for path in found if int(path.name, 16) in numbers]
    damage(found[0])
    values = model.values()
    with pytest.raises(RuntimeError, match=f"{match}.*copy it back"):
        model.load("b")
    assert torch.equal(model.values(), values)
    model.step()


def test_a_damaged_row_is_named_when_it_is_read(tmp_path: Path) -> None:
    model = StoredModel(tmp_path)
    model.train_steps(6)
    model.save("b")
    model.load()
    (manifest,) = tmp_path.glob("index/*/manifest.json")
    for number in json.loads(manifest.read_bytes())["segments"][0]["files"]:
        path = next(tmp_path.glob(f"rows/*/{number:08x}"))
        data = bytearray(path.read_bytes())
        data[4096 + 40 :: 64] = bytes(255 - byte for byte in data[4096 + 40 :: 64])
        path.write_bytes(data)
    for _ in range(2):  # and from then on
        with pytest.raises(RuntimeError, match=r"offset [0-9]+ of .*/rows/.*id [0-9]+"):
            model.train_steps(3)


def test_a_moved_directory_still_loads(tmp_path: Path, losses: list[str]) -> None:
    model = StoredModel(tmp_path / "here")
    model.train_steps(4)
    model.save("a")
    del model
    shutil.move(tmp_path / "here", tmp_path / "there")
    model = StoredModel(tmp_path / "there")
    assert model.load() == 4
    goes_on(model, losses, 4)


# -- failures while a snapshot is made -----------------------------------------------------------


class FailingDisk(Disk):
    """Raises at one of its calls; counts them. It does not wait for the disk."""

    def __init__(self, fail_at: int, error: BaseException) -> None:
        self.calls, self.fail_at, self.error = 0, fail_at, error

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name.startswith("_") or not hasattr(Disk, name):
            return found

        def call(*arguments: object) -> object:
            self.calls += 1
            if self.calls == self.fail_at and name not in ("remove", "close"):
                raise self.error
            return None if name.startswith("sync") else found(*arguments)

        return call


@pytest.mark.parametrize("every", [14, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "the disk fails"), KeyboardInterrupt()])
def test_a_failure_leaves_the_snapshot_before_and_training_goes_on(
    error: BaseException,
    every: int,
    tmp_path: Path,
    losses: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = StoredModel(tmp_path)
    model.train_steps(2)
    model.save("a")
    counting = FailingDisk(0, error)
    monkeypatch.setattr(SAVE, "_DISK", counting)
    model.save("a")
    failed = 0
    calls = range(1, counting.calls + 1, every)
    for fail_at in calls:
        monkeypatch.setattr(SAVE, "_DISK", FailingDisk(fail_at, error))
        try:
            model.save("a")
        except (OSError, KeyboardInterrupt):
            failed += 1
        assert checkpoint.snapshots(model) == ["a"]
        assert model.load() == 2
    assert failed > len(calls) // 2
    monkeypatch.setattr(SAVE, "_DISK", Disk())
    model.save("a")
    assert len(list((tmp_path / "index").iterdir())) == 1
    goes_on(model, losses, 2)


def test_ids_are_as_many_as_the_report_says(tmp_path: Path) -> None:
    model = StoredModel(tmp_path)
    model.train_steps(3)
    model.save("a")
    report = checkpoint.load_snapshot(model)
    assert report.tables["users"].ids == model.users.group.size(0)
    assert report.tables["users"].exact
    assert report.tables["ads"].ids == model.ads.group.size(0)
    assert 0 < report.tables["users"].ids < IDS


def test_snapshots_leave_room_on_a_bounded_disk(tmp_path: Path) -> None:
    """Rows that are seldom changed do not hold on to the files that others have left."""
    disk, segment = 1 << 20, 32 << 10
    torch.manual_seed(0)
    storage = td.SSDStore(tmp_path, cache="64 rows", disk=disk, segment=segment)
    table = td.DynamicEmbedding(64, optimizer=td.SGD(lr=0.1), storage=storage)
    draw = torch.Generator().manual_seed(1)
    for step in range(90):
        ids = (torch.rand(60, generator=draw) ** 3 * 1100).long()  # a few hundred KB in all
        table(ids).sum().backward()
        table.optimizer.step()
        if step % 3 == 2:
            checkpoint.save_snapshot(table, "last")
        assert sum(path.stat().st_size for path in tmp_path.glob("rows/*/*")) <= disk
    values = table.group.read(0, torch.arange(1100))
    checkpoint.load_snapshot(table)
    assert torch.equal(table.group.read(0, torch.arange(1100)), values)


def test_what_a_run_without_a_snapshot_has_left_takes_no_room(tmp_path: Path) -> None:
    storage = td.SSDStore(tmp_path, cache="64 rows", disk="512KiB", segment="64KiB")
    for _ in range(3):
        table = td.DynamicEmbedding(64, name="t", optimizer=td.SGD(lr=0.1), storage=storage)
        for step in range(12):
            table(torch.arange(40) + 40 * step).sum().backward()
            table.optimizer.step()
        del table
    assert not checkpoint.snapshots(tmp_path)


def test_files_that_are_there_count_as_room_for_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = td.SSDStore(tmp_path, segment="1MiB")
    table = td.DynamicEmbedding(8, name="t", optimizer=td.SGD(lr=0.1), storage=storage)
    table(torch.arange(10)).sum().backward()
    table.optimizer.step()
    checkpoint.save_snapshot(table, "a")
    own = sum(path.stat().st_size for path in tmp_path.glob("rows/*/*"))
    usage = shutil.disk_usage(tmp_path)._replace(free=12345)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert own > 0
    assert storage.total_bytes() == own + 12345
