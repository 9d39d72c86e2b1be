"""Loaded packages that follow a delta log: after each commit, the bits of the trainer's model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from altered_packages import with_manifest
from http_server import environment
from packaged import HEADROOM, VERSION, SmallModel, base_of, features, small_model
from publishing import INPUTS, FailingChanges, answer, new_trainer, publish, train

from torch_dynemb import checkpoint, delta_log, serving
from torch_dynemb.delta_log.reader import LogPosition
from torch_dynemb.delta_log.segment import Segment
from torch_dynemb.serving.packages.base import PackageBase
from torch_dynemb.serving.packages.manifest import read_package_manifest

if TYPE_CHECKING:
    from conftest import Package

pytestmark = pytest.mark.cpu_only("the package is compiled for the CPU")

U, V = "bags.u", "bags.v"


def assert_same(served: serving.ServedModel, model: SmallModel) -> None:
    score, others = served.run(*INPUTS)
    expected = answer(model)
    assert torch.equal(score, expected[0])
    assert torch.equal(others["pooled"], expected[1])


def segments(log: Path) -> list[Path]:
    return sorted((log / "r000-of-001").glob("*.delta"))


def test_after_each_commit_a_package_has_the_bits_of_the_trainer(
    live_package: Package, tmp_path: Path
) -> None:
    model, publisher = new_trainer(live_package, tmp_path / "log")
    with publisher, serving.load(live_package.path, follow=tmp_path / "log") as served:
        assert_same(served, model)
        assert served.follower.update() == 0
        assert served.sequence is None
        for number in range(1, 8):
            train(model, number)
            assert publish(publisher) == number
            assert served.follower.update() == 1
            assert served.sequence == number
            assert served.follower.step == model.bags.group.steps
            assert_same(served, model)
        assert served.stats()[U].ids == model.bags.group.size(0)
        assert served.stats()[V].ids == model.bags.group.size(1)
    with serving.load(live_package.path, follow=tmp_path / "log") as again:
        assert again.follower.update(until=5) == 5
        assert again.follower.update() == 2
        assert_same(again, model)


def test_a_package_takes_commits_in_a_thread(live_package: Package, tmp_path: Path) -> None:
    model, publisher = new_trainer(live_package, tmp_path / "log")
    served = serving.load(live_package.path, follow=tmp_path / "log")
    with publisher:
        served.follower.start(every_seconds=0.001)
        for number in (1, 2, 3):
            train(model, number)
            publish(publisher)
        last = time.monotonic() + 60
        while served.sequence != 3:
            served.follower.check()
            assert time.monotonic() < last
            time.sleep(0.001)
    assert_same(served, model)
    served.close()
    with pytest.raises(RuntimeError, match="follow: this model is closed"):
        publish_and_update(live_package, tmp_path, served)


def publish_and_update(package: Package, folder: Path, served: serving.ServedModel) -> None:
    """One more commit, of a trainer that has begun again."""
    model, publisher = new_trainer(package, folder / "log")
    with publisher:
        train(model, 9)
        publish(publisher)
        served.follower.update()


def test_the_dense_part_follows(live_package: Package, tmp_path: Path) -> None:
    model, publisher = new_trainer(live_package, tmp_path / "log")
    with (
        publisher,
        serving.load(live_package.path, follow=tmp_path / "log") as served,
        serving.load(live_package.path, follow=tmp_path / "log") as later,
    ):
        for number in range(1, 6):
            train(model, number, dense=number != 3)
            publish(publisher)
            assert served.follower.update() == 1
            assert_same(served, model)
            assert served.run(*INPUTS)[1]["scale"].tolist() == model.scale.tolist()
            assert served.dense_version == f"{VERSION}+{number}"
        assert served.dense_behind == served.stats()[U].dense_behind == 0
        assert later.follower.update() == 5
        assert_same(later, model)


@pytest.mark.long
def test_no_run_reads_two_versions(live_package: Package, tmp_path: Path) -> None:
    model, publisher = new_trainer(live_package, tmp_path / "log")
    expected = {answer(model)[0].detach().numpy().tobytes()}
    seen: list[bytes] = []
    with publisher, serving.load(live_package.path, follow=tmp_path / "log", runners=2) as served:
        stop = threading.Event()

        def run() -> None:
            while not stop.is_set():
                seen.append(served.run(*INPUTS)[0].numpy().tobytes())

        readers = [threading.Thread(target=run) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for number in range(1, 16):
                train(model, number, dense=True)
                publish(publisher)
                expected.add(answer(model)[0].detach().numpy().tobytes())
                served.follower.update()
                assert_same(served, model)
        finally:
            stop.set()
            for reader in readers:
                reader.join()
    assert len(seen) > 0
    assert set(seen) <= expected


def test_a_dense_part_that_is_kept_is_counted(live_package: Package, tmp_path: Path) -> None:
    model, publisher = new_trainer(live_package, tmp_path / "log")
    with (
        publisher,
        serving.load(live_package.path, follow=tmp_path / "log", dense="keep") as served,
    ):
        for number in (1, 2, 3):
            train(model, number, dense=number != 2)
            publish(publisher)
        served.follower.update()
        score, others = served.run(*INPUTS)
        assert torch.equal(others["pooled"], answer(model)[1])
        assert not torch.equal(score, answer(model)[0])
        assert others["scale"].tolist() == [2.0]
        assert served.dense_behind == served.stats()[U].dense_behind == 2
        assert served.dense_version == served.version
    with pytest.raises(ValueError, match="dense is 'kept', expected 'follow' or 'keep'"):
        serving.load(live_package.path, dense="kept")  # type: ignore[arg-type]


def test_a_dense_tensor_that_a_package_has_not_is_refused(
    live_package: Package, tmp_path: Path
) -> None:
    model, publisher = new_trainer(live_package, tmp_path / "log")
    publisher.close()
    model.register_buffer("other", torch.ones(3))
    publisher.attach(model, base=base_of(live_package.path))
    with publisher:
        train(model, 1, dense=True)
        publish(publisher)
    with serving.load(live_package.path, follow=tmp_path / "log") as served:
        before = served.run(*INPUTS)[0]
        with pytest.raises(ValueError, match=r"dense tensor 'other', of which the package has non"):
            served.follower.update()
        assert torch.equal(served.run(*INPUTS)[0], before)
        assert served.sequence == 0
    folder = with_manifest(live_package, tmp_path / "unused", unused=["model.other"])
    with serving.load(folder, follow=tmp_path / "log") as served:
        assert served.follower.update() == 1
        assert_same(served, model)


@pytest.mark.parametrize("late", [False, True])
def test_an_error_in_any_table_leaves_the_commit_before(
    live_package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    model, publisher = new_trainer(live_package, tmp_path / "log")
    failing = FailingChanges(monkeypatch, late=late)
    with publisher, serving.load(live_package.path, follow=tmp_path / "log") as served:
        train(model, 1, dense=True)
        publish(publisher)
        served.follower.update()
        expected = served.run(*INPUTS)[0]
        stats = {name: of.ids for name, of in served.stats().items()}
        train(model, 2, dense=True)
        publish(publisher)
        for fails_at in range(1, 20):
            failing.fail(fails_at)
            try:
                served.follower.update()
            except OSError:
                assert torch.equal(served.run(*INPUTS)[0], expected), fails_at
                assert {name: of.ids for name, of in served.stats().items()} == stats
                assert served.sequence == 1
            else:
                break
        # what takes turns: both tables and the dense part of a copy, or of both
        assert fails_at > 4
        assert_same(served, model)
        failing.fail(0)
        train(model, 3, dense=True)
        publish(publisher)
        served.follower.update()
        assert_same(served, model)


def test_a_commit_without_headroom_is_refused_whole(live_package: Package, tmp_path: Path) -> None:
    model, publisher = new_trainer(live_package, tmp_path / "log")
    with publisher, serving.load(live_package.path, follow=tmp_path / "log") as served:
        before = served.stats()
        expected = served.run(*INPUTS)[0]
        group = model.bags.group
        group.insert_or_assign(0, torch.arange(50), torch.ones(50, 8))
        group.insert_or_assign(1, torch.arange(5000, 5001 + HEADROOM), torch.ones(301, 4))
        publish(publisher)
        with pytest.raises(serving.NoHeadroomError, match=f"'{V}' has 300 rows free.*need 301"):
            served.follower.update()
        assert served.stats() == before
        assert torch.equal(served.run(*INPUTS)[0], expected)
        assert served.sequence == 0
        served.erase(V, torch.arange(1000, 1001))  # which is in the log, and in no input
        assert served.follower.update() == 1
        assert served.sequence == 1


def test_other_logs_are_refused(live_package: Package, tmp_path: Path) -> None:
    model = small_model(seed=1, many=0)
    with delta_log.DeltaLog(tmp_path / "other") as publisher:
        publisher.attach(model)
        train(model, 1)
        publish(publisher)
    with serving.load(live_package.path, follow=tmp_path / "other") as served:
        expected = served.run(*INPUTS)[0]
        with pytest.raises(delta_log.NewBaseNeededError, match="but not since"):
            served.follower.update()
        assert torch.equal(served.run(*INPUTS)[0], expected)


def test_dropped_commits_are_told(live_package: Package, tmp_path: Path) -> None:
    log = tmp_path / "log"
    model, publisher = new_trainer(live_package, log, segment_bytes=1)
    with publisher, serving.load(live_package.path, follow=log) as served:
        for number in range(1, 5):
            train(model, number)
            publish(publisher)
            if number == 1:
                served.follower.update()
                expected = served.run(*INPUTS)[0]
        segments(log)[1].unlink()
        with pytest.raises(delta_log.NewBaseNeededError, match=r"commit 1 was read last.* is 3"):
            served.follower.update()
        assert served.sequence == 1
        assert torch.equal(served.run(*INPUTS)[0], expected)


def test_packages_of_a_commit_go_on_from_there(live_package: Package, tmp_path: Path) -> None:
    """What export writes of a position, with the tables of the shared package."""
    log = tmp_path / "log"
    model, publisher = new_trainer(live_package, log)
    base = read_package_manifest(live_package.path).base
    assert base is not None
    with publisher, serving.load(live_package.path) as served:
        assert publisher.position()[1:4] == (None, 0, 0)
        for number in (1, 2):
            train(model, number)
            publish(publisher)
        position = publisher.position()
        assert position.tables == {U: 8, V: 4}
        assert (position.base, position.sequence) == (base.uuid, 2)
        later = base._replace(sequence=2, chain=position.chain)
        other = base._replace(sequence=2, chain=position.chain ^ 1)
        train(model, 3)
        publish(publisher)
        assert served.sequence is None
    # rows of the base in the place of those of commit 2: commit 3 does not bring the others
    with serving.load(with_manifest(live_package, tmp_path / "2", base=later), follow=log) as two:
        assert two.sequence == 2
        assert two.follower.update() == 1
        assert two.sequence == 3
    folder = with_manifest(live_package, tmp_path / "3", base=other)
    with (
        serving.load(folder, follow=log) as three,
        pytest.raises(delta_log.NewBaseNeededError, match="or it is another log"),
    ):
        three.follower.update()


def test_packages_that_cannot_follow_say_what_to_do(
    package: Package, live_package: Package, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"only read: export the model with headroom=.*base="):
        serving.load(package.path, follow=tmp_path)
    without = with_manifest(live_package, tmp_path / "p", base=None)
    with pytest.raises(ValueError, match=r"does not say which commit.*with base="):
        serving.load(without, follow=tmp_path)
    with pytest.raises(TypeError, match="log is 5, expected the directory"):
        serving.load(live_package.path, follow=5)  # type: ignore[arg-type]
    with (
        serving.load(live_package.path) as served,
        pytest.raises(RuntimeError, match=r"give follow= to serving.load"),
    ):
        _ = served.follower


def test_a_base_has_to_go_with_the_model(live_package: Package, tmp_path: Path) -> None:
    frozen, base = live_package.frozen, base_of(live_package.path)
    inputs = features(4, 20)
    with pytest.raises(ValueError, match="rows of the package would never change: give headroom="):
        serving.export(frozen, tmp_path / "p", inputs, base=base)
    with pytest.raises(TypeError, match="base is 3, expected the path"):
        serving.export(frozen, tmp_path / "p", inputs, headroom=1, base=3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        serving.export(frozen, tmp_path / "p", inputs, headroom=1, base=tmp_path / "none")
    position = LogPosition("0" * 32, None, 0, 0, {U: 8, V: 5})
    with pytest.raises(ValueError, match=f"{V}' has 4 columns, and 5 in base"):
        serving.export(frozen, tmp_path / "p", inputs, headroom=1, base=position)
    position = position._replace(tables={"u": 8})
    with pytest.raises(ValueError, match=f"none that could be '{V}'"):
        serving.export(frozen, tmp_path / "p", inputs, headroom=1, base=position)
    assert not list(tmp_path.iterdir())


def test_the_manifest_says_what_tables_are_called_in_the_log(live_package: Package) -> None:
    with checkpoint.open(base_of(live_package.path)) as base:
        expected = PackageBase(base.uuid, None, 0, 0, {U: U, V: V})
    assert read_package_manifest(live_package.path).base == expected


FOLLOWER = """
import sys, torch
from torch_dynemb import serving
torch.set_num_threads(1)
served = serving.load(sys.argv[1], follow=sys.argv[2])
while True:
    served.follower.update()
    print(served.sequence, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.long
def test_a_follower_that_was_killed_begins_again_and_agrees(
    live_package: Package, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    model, publisher = new_trainer(live_package, log)
    with publisher:
        for number in (1, 2):
            train(model, number)
            publish(publisher)
        follower = subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, live_package.path, log],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment() | {"OMP_NUM_THREADS": "1"},
        )
        try:
            assert follower.stdin is not None
            assert follower.stdout is not None
            assert follower.stdout.readline() == "2\n"
            train(model, 3)
            publish(publisher)
            follower.stdin.write("\n")  # is killed while it applies the third one
            follower.stdin.flush()
        finally:
            os.kill(follower.pid, signal.SIGKILL)
            follower.communicate()
        with serving.load(live_package.path, follow=log) as served:
            assert served.follower.update() == 3
            assert_same(served, model)
            train(model, 4)
            publish(publisher)
            assert served.follower.update() == 1
            assert_same(served, model)


def test_a_torn_tail_is_no_commit(live_package: Package, tmp_path: Path) -> None:
    log = tmp_path / "log"
    model, publisher = new_trainer(live_package, log)
    with publisher:
        for number in (1, 2):
            train(model, number)
            publish(publisher)
    (file,) = segments(log)
    with Segment(file, last=True) as segment:
        begin = [place.begin for place in segment.heads()][1]
    os.truncate(file, begin + 1000)
    with serving.load(live_package.path, follow=log) as served:
        assert served.follower.update() == 1
        assert served.sequence == 1
    data = bytearray(file.read_bytes())
    data[begin - 100] ^= 1
    file.write_bytes(data)
    with (
        serving.load(live_package.path, follow=log) as served,
        pytest.raises(checkpoint.DamagedFileError, match="the delta log is damaged"),
    ):
        served.follower.update()
