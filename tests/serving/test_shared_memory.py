"""Packages that processes share: one copy in memory, read while a process of several changes it.

Models that a process loads twice share the file, too: locks and mappings belong to open files.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from altered_packages import copied, with_manifest
from forked import ended, forked
from packaged import VERSION, features
from publishing import INPUTS, answer, new_trainer, publish, train
from shared_tables import Dense, U, assert_same, pooled, rows_of

from torch_dynemb import serving
from torch_dynemb.delta_log import NewBaseNeededError
from torch_dynemb.errors import DamagedFileError, DiskFullError, InUseError
from torch_dynemb.serving.packages import shared_folder
from torch_dynemb.serving.packages.manifest import TABLES
from torch_dynemb.serving.packages.shared_versions import SharedVersions

if TYPE_CHECKING:
    from conftest import Package

pytestmark = [
    pytest.mark.cpu_only("the package is compiled for the CPU"),
    pytest.mark.long,
]  # packages are compiled


def constants(place: Path) -> Path:
    (file,) = place.glob("*/constants")
    return file


def versions_of(served: serving.ServedModel) -> SharedVersions:
    versions = served._versions
    assert isinstance(versions, SharedVersions)
    return versions


def test_models_that_share_answer_as_one_alone(package: Package, place: Path) -> None:
    folder = copied(package, place.parent / "package", (TABLES,))
    inputs = features(16, 100, seed=3)
    score, others = package.frozen(*inputs)
    with serving.load(folder, shared_memory=place) as first:
        (folder / TABLES).unlink()
        with serving.load(folder, shared_memory=place, runners=2) as second:
            for served in (first, second):
                found, rest = served.run(*inputs)
                assert torch.equal(found, score)
                assert torch.equal(rest["pooled"], others["pooled"])
                assert served.sequence is served.commit_age is None
                assert served.dense_version == VERSION
                with pytest.raises(RuntimeError, match="this process only reads the tables"):
                    served.erase("bags.u", torch.arange(2))
            scale = first.run(*inputs)[1]["scale"]
        assert torch.equal(first.run(*inputs)[0], score)
    assert scale.tolist() == [2.0]  # it outlives the file
    assert not list(place.iterdir())


@pytest.mark.parametrize("dense", ["keep", "follow"])
def test_processes_read_the_updates_of_one(
    live_package: Package, place: Path, tmp_path: Path, dense: Dense
) -> None:
    model, publisher = new_trainer(live_package, tmp_path / "log")
    path, follows = live_package.path, dense == "follow"
    with (
        publisher,
        serving.load(path, shared_memory=place) as early,
        serving.load(path, shared_memory=place, follow=tmp_path / "log", dense=dense) as writer,
        serving.load(path, shared_memory=place, runners=2) as late,
    ):
        all_of_them = (early, writer, late)
        for number in range(1, 5):
            train(model, number, dense=True)
            publish(publisher)
            assert writer.follower.update() == 1
            for served in all_of_them:
                assert_same(served, answer(model), dense=follows)
                assert served.sequence == number
                assert served.dense_behind == (0 if follows else number)
                assert served.dense_version == (f"{VERSION}+{number}" if follows else VERSION)
                assert served.commit_age is not None
                assert served.stats()[U].ids == model.bags.group.size(0)
        writer.apply(U, torch.tensor([7]), torch.full((1, 8), 5.0))
        for served in all_of_them:
            assert rows_of(served, torch.tensor([7])).tolist() == [[5.0] * 8]
            assert served.sequence == 4
        with pytest.raises(InUseError, match=rf"process {os.getpid()} follows a delta log"):
            serving.load(path, shared_memory=place, follow=tmp_path / "log", dense=dense)
        writer.close()
        train(model, 5, dense=True)
        publish(publisher)
        with serving.load(path, shared_memory=place, follow=tmp_path / "log", dense=dense) as new:
            assert new.sequence == 4
            assert rows_of(new, torch.tensor([7])).tolist() == [[5.0] * 8]
            assert new.follower.update() == 1
            assert torch.equal(pooled(late), pooled(new))
            assert early.sequence == 5
            assert early.dense_behind == (0 if follows else 5)
    assert not list(place.iterdir())


def test_damaged_files_are_errors(live_package: Package, place: Path) -> None:
    path = live_package.path
    with serving.load(path, shared_memory=place):
        whole = constants(place).read_bytes()
        folder = constants(place).parent
    for content in (
        b"",
        whole[:10],
        whole[:100],
        whole[:4096],
        whole[:-1],
        whole + b"\0",
        bytes(len(whole)),
        whole[:50] + b"7" + whole[51:],
    ):
        folder.mkdir()
        (folder / "constants").write_bytes(content)
        with pytest.raises(DamagedFileError, match=r"constants: .*remove the file, and load again"):
            serving.load(path, shared_memory=place)
        # the file of a process that was killed, as a user removes it
        (folder / "constants").unlink(missing_ok=True)
        with serving.load(path, shared_memory=place) as served:
            assert served.run(*INPUTS)
        assert not list(place.iterdir())


def test_packages_never_take_the_rows_of_others(
    live_package: Package, place: Path, tmp_path: Path
) -> None:
    other = with_manifest(live_package, tmp_path / "other", version="tuesday")
    with serving.load(live_package.path, shared_memory=place) as first:
        first_file = constants(place)
        with serving.load(other, shared_memory=place) as second:
            assert len(list(place.iterdir())) == 2
            assert (first.version, second.version) == (VERSION, "tuesday")
        assert constants(place) == first_file

    def die() -> None:
        with serving.load(other, shared_memory=place):
            os.kill(os.getpid(), signal.SIGKILL)

    # what a killed process leaves is removed by one that starts another package
    assert ended(forked(die)) == -signal.SIGKILL
    assert len(list(place.iterdir())) == 1
    with serving.load(live_package.path, shared_memory=place):
        assert constants(place) == first_file


def test_files_from_before_a_restart_of_the_system_are_not_used(
    live_package: Package, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        with serving.load(live_package.path, shared_memory=place):
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(forked(die)) == -signal.SIGKILL
    old = constants(place)
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr(shared_folder, "_BOOT", tmp_path / "boot")
    with serving.load(live_package.path, shared_memory=place) as served:
        assert served.run(*INPUTS)
        assert constants(place) != old
    assert not list(place.iterdir())


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 64 KiB at a folder."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_an_error(package: Package, place: Path) -> None:
    with small_disk(place):
        message = r"No space left on device: the constants take \d+ bytes, and \d+ bytes are free"
        with pytest.raises(DiskFullError, match=message):
            serving.load(package.path, shared_memory=place)
        assert not list(place.glob("*/*-*"))


def test_a_limit_of_files_is_an_error(package: Package, place: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(DiskFullError, match=r"File too large: .*ulimit -f"):
            serving.load(package.path, shared_memory=place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(place.glob("*/*-*"))
    with serving.load(package.path, shared_memory=place) as served:
        assert served.run(*INPUTS)


def test_wrong_places_are_errors(package: Package, place: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a directory: give one in memory, such as"):
        serving.load(package.path, shared_memory=place / "none")
    gpu = with_manifest(package, tmp_path / "gpu", device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(ValueError, match=r"shared_memory is .*, but the package is for cuda"):
            serving.load(gpu, shared_memory=place)


def test_models_that_write_their_buffers(
    live_package: Package, place: Path, tmp_path: Path
) -> None:
    writing = with_manifest(live_package, tmp_path / "writing", mutated=["scale"])
    with pytest.raises(ValueError, match=r"its buffers \['scale'\], .*: give dense='keep'"):
        serving.load(writing, shared_memory=place, follow=tmp_path / "log")
    keep = serving.load(writing, shared_memory=place, follow=tmp_path / "log", dense="keep")
    with keep, serving.load(writing, shared_memory=place) as other:
        for served, value in ((keep, 3.0), (other, 4.0)):
            (copy,) = versions_of(served)._file.copies
            copy.tensors["model.scale"].fill_(value)  # as runs would
        assert keep.run(*INPUTS)[1]["scale"].tolist() == [3.0]
        assert other.run(*INPUTS)[1]["scale"].tolist() == [4.0]


def test_processes_that_start_together_read_the_package_once(
    package: Package, place: Path, tmp_path: Path
) -> None:
    expected = package.frozen(*INPUTS)[0]
    reads, begins = os.pipe(), os.pipe()

    def start() -> None:
        os.close(begins[1])
        os.read(begins[0], 1)  # until all have been forked
        read = serving.load.__globals__["_read_constants"]
        serving.load.__globals__["_read_constants"] = lambda *given, **named: (
            os.write(reads[1], b"."),
            read(*given, **named),
        )[1]
        with serving.load(package.path, shared_memory=place) as served:
            assert torch.equal(served.run(*INPUTS)[0], expected)

    processes = [forked(start) for _ in range(6)]
    os.close(begins[1])
    assert [ended(process) for process in processes] == [0] * 6
    os.close(reads[1])
    with os.fdopen(reads[0], "rb") as file:
        # one that starts after the last one has ended reads it again
        assert 1 <= len(file.read()) < 6
    os.close(begins[0])
    assert not list(place.iterdir())


def mapped(pid: int, file: Path) -> dict[str, int]:
    """KiB of a file that a process maps, by name in /proc/PID/smaps; all of its mappings."""
    counts = dict.fromkeys(("Size", "Rss", "Pss", "Private_Dirty"), 0)
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.partition(" ")[0]:
            inside = line.endswith(f" {file}")
        elif inside and name in counts:
            counts[name] += int(value.split()[0])
    return counts


def test_memory_has_the_tables_once(package: Package, place: Path) -> None:
    touched, go_on = os.pipe(), os.pipe()

    def read_all() -> None:
        with serving.load(package.path, shared_memory=place) as served:
            (copy,) = versions_of(served)._file.copies
            assert sum(float(of.sum()) for of in copy.tensors.values() if of.numel()) != 0
            os.write(touched[1], b".")
            os.read(go_on[0], 1)

    readers = [forked(read_all) for _ in range(3)]
    os.close(touched[1])  # so that a read ends if a reader has failed
    try:
        for _ in readers:
            assert os.read(touched[0], 1) == b"."
        size = constants(place).stat().st_size / 1024
        counts = [mapped(reader, constants(place)) for reader in readers]
    finally:
        for reader in readers:
            os.kill(reader, signal.SIGKILL)
            assert ended(reader) == -signal.SIGKILL
    assert size > 3000
    for count in counts:
        assert count["Rss"] > 0.9 * size
        assert count["Private_Dirty"] == 0
    assert sum(count["Pss"] for count in counts) < 1.01 * size
    for end in (touched[0], *go_on):
        os.close(end)


def test_a_run_that_does_not_end_is_named(
    live_package: Package, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "_PATIENCE", 0.05)
    model, publisher = new_trainer(live_package, tmp_path / "log")
    with publisher:
        for number in (1, 2):
            train(model, number)
            publish(publisher)
    pinned = os.pipe()

    def stop_in_a_run() -> None:
        served = serving.load(live_package.path, shared_memory=place)
        with versions_of(served).reading():
            os.write(pinned[1], b".")
            signal.pause()

    with serving.load(live_package.path, shared_memory=place, follow=tmp_path / "log") as writer:
        reader = forked(stop_in_a_run)
        os.read(pinned[0], 1)
        assert writer.follower.update(until=1) == 1
        expected = pooled(writer)
        with pytest.raises(InUseError, match=rf"processes {reader} have run an earlier version"):
            writer.follower.update()
        assert writer.sequence == 1
        assert torch.equal(pooled(writer), expected)
        os.kill(reader, signal.SIGKILL)
        assert ended(reader) == -signal.SIGKILL
        assert writer.follower.update() == 1
        assert_same(writer, answer(model), dense=False)
    assert not list(place.iterdir())
    for end in pinned:
        os.close(end)


def test_a_log_that_lacks_what_was_read_is_refused(
    live_package: Package, place: Path, tmp_path: Path
) -> None:
    model, publisher = new_trainer(live_package, tmp_path / "log")
    with publisher:
        train(model, 1)
        publish(publisher)
    path = live_package.path
    with serving.load(path, shared_memory=place) as reader:
        with serving.load(
            path, shared_memory=place, follow=tmp_path / "log", dense="keep"
        ) as writer:
            writer.follower.update()
        expected = pooled(reader)
        page = constants(place).stat().st_blksize
        with constants(place).open("r+b") as file:  # as if killed within a change
            length = struct.unpack("<I", file.read(12)[8:])[0]
            file.seek(-(-(16 + length) // page) * page + 8)
            file.write(struct.pack("<q", 1))
        with pytest.raises(NewBaseNeededError, match=r"have read commit 1 from .* leads to None"):
            serving.load(path, shared_memory=place, follow=tmp_path / "empty", dense="keep")
        assert torch.equal(pooled(reader), expected)
        assert not list(place.glob("*/draft-*"))
        with serving.load(
            path, shared_memory=place, follow=tmp_path / "log", dense="keep"
        ) as writer:
            assert writer.sequence == 1
            assert torch.equal(pooled(reader), expected)
            assert len({versions_of(served)._file._inode for served in (reader, writer)}) == 1
    assert not list(place.iterdir())
