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
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from altered_packages import copied, with_manifest
from forked import ended, forked, kill_at
from packaged import HEADROOM, VERSION, SmallModel, features
from publishing import INPUTS, answer, new_trainer, publish, train
from torch import Tensor

from torch_dynemb import serving
from torch_dynemb.delta_log import NewBaseNeededError
from torch_dynemb.errors import DamagedFileError, DiskFullError, InUseError
from torch_dynemb.serving.packages import shared_folder
from torch_dynemb.serving.packages.manifest import TABLES
from torch_dynemb.serving.packages.shared_versions import SharedVersions

if TYPE_CHECKING:
    from conftest import Package

pytestmark = pytest.mark.cpu_only("the package is compiled for the CPU")

U, V = "bags.u", "bags.v"
Dense = Literal["follow", "keep"]
CHANGED = ("shared_versions.py", "shared_memory.py", "shared_folder.py", "whole_commits.py")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def constants(place: Path) -> Path:
    (file,) = place.glob("*/constants")
    return file


def versions_of(served: serving.ServedModel) -> SharedVersions:
    versions = served._versions
    assert isinstance(versions, SharedVersions)
    return versions


def pooled(served: serving.ServedModel) -> Tensor:
    return served.run(*INPUTS)[1]["pooled"]


def rows_of(served: serving.ServedModel, ids: Tensor) -> Tensor:
    """Rows of table u: float32 [n, 8]."""
    count = ids.numel()
    given = {"u": (ids, torch.arange(count + 1)), "v": torch.zeros(count, 3, dtype=torch.int64)}
    return served.run(given, torch.zeros(count, 1))[1]["pooled"][:, :8]


def assert_same(served: serving.ServedModel, expected: list[Tensor], *, dense: bool = True) -> None:
    score, others = served.run(*INPUTS)
    assert torch.equal(others["pooled"], expected[1])
    if dense:
        assert torch.equal(score, expected[0])


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
        serving.load.__globals__["_read_constants"] = lambda *given: (
            os.write(reads[1], b"."),
            read(*given),
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
    for end in (*touched, *go_on):
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


class Commits:
    """A log of three commits, and what a model answers after each of them."""

    def __init__(self, package: Package, folder: Path) -> None:
        self.path = folder / "log"
        model, publisher = new_trainer(package, self.path)
        self.answers, self.rows = [answer(model)], [self._rows(model)]
        with publisher:
            for number in (1, 2, 3):
                train(model, number, dense=True)
                publish(publisher)
                self.answers.append(answer(model))
                self.rows.append(self._rows(model))
        self.ids = torch.arange(200)

    @staticmethod
    def _rows(model: SmallModel) -> Tensor:
        ids = torch.arange(200)
        given = {"u": (ids, torch.arange(201)), "v": torch.zeros(200, 3, dtype=torch.int64)}
        return answer(model, (given, torch.zeros(200, 1)))[1][:, :8]

    def check(self, served: serving.ServedModel, *, dense: bool, whole: bool) -> None:
        """Check that a model has the commit of its number, or else rows of commits about it."""
        at = served.sequence or 0
        if whole:
            assert_same(served, self.answers[at], dense=dense)
        found = rows_of(served, self.ids)
        known = [(found == rows).all(1) for rows in self.rows[at : at + 2]]
        assert bool(torch.stack(known).any(0).all())


def check_kill(package: Package, commits: Commits, place: Path, dense: Dense, line: int) -> bool:
    """Kill a writer at a line; return whether it had not ended before.

    Others then have whole rows, and with ``dense="follow"`` a whole version; the next writer leads
    all of them to the last commit.
    """
    path = package.path

    def write() -> None:
        kill_at(line, CHANGED)
        with serving.load(path, shared_memory=place, follow=commits.path, dense=dense) as writer:
            writer.follower.update(until=1)
            writer.follower.update(until=2)

    with serving.load(path, shared_memory=place) as reader:
        status = ended(forked(write))
        assert status in (0, -signal.SIGKILL), line
        commits.check(reader, dense=False, whole=status == 0 or dense == "follow")
        with serving.load(path, shared_memory=place) as late:
            commits.check(late, dense=False, whole=status == 0 or dense == "follow")
            before = reader.sequence or 0
            with serving.load(
                path, shared_memory=place, follow=commits.path, dense=dense
            ) as writer:
                for served in (writer, reader, late):
                    assert (served.sequence or 0) >= before, line
                    commits.check(served, dense=dense == "follow", whole=True)
                writer.follower.update()
                for served in (writer, reader, late):
                    assert served.sequence == 3
                    commits.check(served, dense=dense == "follow", whole=True)
                ids = torch.arange(10_000, 10_000 + writer.stats()[U].free_rows)
                writer.apply(U, ids, torch.ones(ids.numel(), 8))  # no row was lost
                assert writer.stats()[U].free_rows == 0
                assert bool((rows_of(reader, ids) == 1).all())
    assert not list(place.iterdir()), line
    return status != 0


@pytest.mark.long
@pytest.mark.parametrize("dense", ["keep", "follow"])
def test_a_writer_that_is_killed_at_any_line(
    live_package: Package, place: Path, tmp_path: Path, dense: Dense
) -> None:
    commits = Commits(live_package, tmp_path)
    killed = 0
    for line in range(1, 10_000, 13):  # once it was each line
        if not check_kill(live_package, commits, place, dense, line):
            break
        killed += 1
    assert killed > 15


@pytest.mark.long
@pytest.mark.parametrize("dense", ["keep", "follow"])
def test_a_writer_that_is_killed_at_any_time(
    live_package: Package, place: Path, tmp_path: Path, dense: Dense
) -> None:
    """Rows of one value each, which a process writes and removes in turn until it is killed."""
    path, log = live_package.path, tmp_path / "log"
    new_trainer(live_package, log)[1].close()
    ids = torch.arange(20_000, 20_000 + HEADROOM)

    def write() -> None:
        with serving.load(path, shared_memory=place, follow=log, dense=dense) as writer:
            for value in range(1, 1 << 20):
                writer.apply(U, ids, torch.full((HEADROOM, 8), float(value)))
                writer.erase(U, ids[value % 7 :: 7])

    torch.manual_seed(0)
    seen = 0
    with serving.load(path, shared_memory=place) as reader:
        missing = rows_of(reader, ids)
        base = pooled(reader)
        for _ in range(40):
            writer = forked(write)
            for _ in range(int(torch.randint(1, 400, ()))):
                found = rows_of(reader, ids)
                there = (found == found[:, :1]).all(1) & (found == found.round()).all(1)
                assert bool((there | (found == missing).all(1)).all())
                written = found[there & (found[:, 0] > 0), 0]
                seen += written.numel()
                if dense == "follow":  # a run reads one version
                    assert written.unique().numel() <= 1
            os.kill(writer, signal.SIGKILL)
            assert ended(writer) == -signal.SIGKILL
            with serving.load(path, shared_memory=place, follow=log, dense=dense) as new:
                new.erase(U, ids)
                assert new.stats()[U].free_rows == HEADROOM
                new.apply(U, ids, torch.full((HEADROOM, 8), 3.0))
                assert bool((rows_of(reader, ids) == 3).all())
                new.erase(U, ids)
                assert torch.equal(rows_of(reader, ids), missing)
                assert torch.equal(pooled(reader), base)
    assert seen > 1000
    assert not list(place.iterdir())
