"""Packages that follow a delta log in C++: a commit is a version, which has the trainer's bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
import torch
import versions_program
from altered_packages import with_manifest
from packaged import HEADROOM, VERSION, Features, base_of, small_model
from publishing import answer, new_trainer, publish, train, write_commit_of_two_ranks
from torch import Tensor

from torch_dynemb import delta_log, ops, serving
from torch_dynemb.changes import batch as batch_format
from torch_dynemb.delta_log.segment import Segment

if TYPE_CHECKING:
    from conftest import Package

pytestmark = pytest.mark.cpu_only("the package is compiled for the CPU")

BAGS, IDS = 512, 250


def inputs() -> tuple[Features, Tensor]:
    """What ``versions_check.cpp`` runs."""
    u = torch.arange(4 * BAGS) % IDS
    v = (torch.arange(3 * BAGS) % IDS).reshape(BAGS, 3)
    return {"u": (u, torch.arange(0, 4 * BAGS + 1, 4)), "v": v}, torch.zeros(BAGS, 1)


def sum_of(tensors: list[Tensor]) -> int:
    """A sum of their bits."""
    result = 0
    for tensor in tensors:
        result = ops.crc32c(tensor.detach().contiguous(), result)
    return result


@pytest.fixture(scope="module")
def program() -> Path:
    return versions_program.build()


@pytest.mark.long
@pytest.mark.parametrize("place", ["live_package", "file_package"])
def test_each_commit_is_a_version_with_the_bits_of_the_trainer(
    place: str, program: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    log = tmp_path / "log"
    live_package: Package = request.getfixturevalue(place)
    model, publisher = new_trainer(live_package, log, segment_bytes=10_000)
    expected = {VERSION: sum_of(answer(model, inputs()))}
    with publisher, versions_program.following(program, live_package.path, log) as follower:
        said = follower.update()
        assert said["versions"]["version"] == VERSION
        assert said["versions"]["sequence"] is None
        for number in range(1, 9):
            train(model, number, dense=number % 2 == 0)
            assert publish(publisher) == number
            outputs = answer(model, inputs())
            said = follower.update()
            expected[f"{VERSION}+{number}"] = sum_of(outputs)
            for of_model in said.values():
                assert (of_model["applied"], of_model["sequence"]) == (1, number), said
            assert said["model"]["behind"] == 1 + number // 2  # the first one has all of it
            assert said["model"]["pooled"] == sum_of([outputs[1]])
            assert said["versions"]["version"] == f"{VERSION}+{number}"
            assert said["versions"]["outputs"] == sum_of(outputs)
        seen = follower.end()
    assert len(list(log.rglob("*.delta"))) > 2
    assert seen["mixed"] == 0
    assert all(expected[version] == found for version, found in seen["sums"].items())
    with versions_program.following(program, live_package.path, log) as again:
        said = again.update(until=5)
        assert said["versions"]["applied"] == said["model"]["applied"] == 5
        assert said["versions"]["outputs"] == expected[f"{VERSION}+5"]
        again.process.kill()  # a restart has the rows of the package, and takes all commits
    with versions_program.following(program, live_package.path, log) as again:
        assert again.update()["versions"]["outputs"] == expected[f"{VERSION}+8"]


@pytest.mark.parametrize("rows", ["int8", "fp16"])
def test_rows_in_other_forms_are_those_that_python_takes(
    live_package: Package, program: Path, tmp_path: Path, rows: Literal["int8", "fp16"]
) -> None:
    log = tmp_path / "log"
    model, publisher = new_trainer(live_package, log, rows=rows)
    with publisher:
        for number in range(1, 3):
            train(model, number)
            publish(publisher)
    with serving.load(live_package.path, follow=log) as served:
        assert served.follower.update() == 2
        score, others = served.run(*inputs())
    expected = [score, *others.values()]
    with versions_program.following(program, live_package.path, log) as follower:
        said = follower.update()
        assert said["versions"]["outputs"] == sum_of(expected)
        assert said["model"]["pooled"] == sum_of([expected[1]])


def test_parts_that_ranks_have_of_tables_are_put_together(
    live_package: Package, program: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    ids = {"u": torch.tensor([7, 150, 3, 120]), "v": torch.tensor([9, 160, 4, 130, 5, 6])}
    rows = {"u": torch.randn(4, 8), "v": torch.randn(6, 4)}
    write_commit_of_two_ranks(live_package, log, ids, rows)
    model = small_model(many=10)
    model.bags.group.erase(1, torch.arange(3))
    for table, name in enumerate(ids):
        model.bags.group.insert_or_assign(table, ids[name], rows[name])
    expected = answer(model, inputs())
    with versions_program.following(program, live_package.path, log) as follower:
        said = follower.update()
        assert said["versions"]["outputs"] == sum_of(expected)
        assert said["model"]["pooled"] == sum_of([expected[1]])
    with serving.load(live_package.path, follow=log) as served:
        assert served.follower.update() == 1
        assert torch.equal(served.run(*inputs())[0], expected[0])
    for path in (log / "r001-of-002").iterdir():
        path.unlink()  # one rank has not written its part yet
    with versions_program.following(program, live_package.path, log) as follower:
        assert follower.update()["versions"]["applied"] == 0


def test_a_commit_without_headroom_is_refused_whole(
    live_package: Package, program: Path, tmp_path: Path
) -> None:
    model, publisher = new_trainer(live_package, tmp_path / "log")
    before = sum_of(answer(model, inputs()))
    with (
        publisher,
        versions_program.following(program, live_package.path, tmp_path / "log") as follower,
    ):
        group = model.bags.group
        group.insert_or_assign(0, torch.arange(50), torch.ones(50, 8))
        group.insert_or_assign(1, torch.arange(5000, 5001 + HEADROOM), torch.ones(301, 4))
        publish(publisher)
        for _ in range(2):
            said = follower.update()
            assert said["versions"]["outputs"] == before
            for of_model in said.values():
                assert "table 'bags.v' has 300 rows free" in of_model["headroom"]
                assert of_model["sequence"] == 0
        group.erase(1, torch.arange(5000, 5100))
        publish(publisher)  # the commit from before has ids without room all the same
        assert "need 301" in follower.update()["model"]["headroom"]


def test_logs_that_do_not_go_on_are_told(
    live_package: Package, program: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    model, publisher = new_trainer(live_package, log, segment_bytes=1)
    with publisher, versions_program.following(program, live_package.path, log) as follower:
        for number in range(1, 5):
            train(model, number)
            publish(publisher)
            if number == 1:
                first = follower.update()
        sorted(log.rglob("*.delta"))[1].unlink()
        said = follower.update()
        assert (
            "commit 1 was read last, but the next one that is there is 3"
            in (said["versions"]["new base"])
        )
        assert said["versions"]["outputs"] == first["versions"]["outputs"]
        assert said["model"]["pooled"] == first["model"]["pooled"]
    last = sorted(log.rglob("*.delta"))[-1]
    last.with_name(f"{9:0<20}.delta").write_bytes(last.read_bytes())
    with versions_program.following(program, live_package.path, log) as follower:
        assert "no batch has the number in its name" in follower.update()["versions"]["damaged"]
    other = tmp_path / "other"
    with delta_log.DeltaLog(other) as of_other:
        of_other.attach(model)
        publish(of_other)
    with versions_program.following(program, live_package.path, other) as follower:
        assert "and not since" in follower.update()["versions"]["new base"]


def test_a_rollback_is_told_at_once(live_package: Package, program: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    model, publisher = new_trainer(live_package, log)
    with versions_program.following(program, live_package.path, log) as follower:
        with publisher:
            for number in (1, 2):
                train(model, number)
                publish(publisher)
            before = follower.update()
            assert follower.update()["versions"]["applied"] == 0
        publisher.rollback(1)
        for _ in range(2):
            said = follower.update()
            for of_model, served in zip(said.values(), before.values(), strict=True):
                assert "commit 2 was read last, and it is there no longer" in of_model["new base"]
                assert of_model["sequence"] == 2
                assert of_model.get("outputs") == served.get("outputs")


def test_a_dense_tensor_that_a_package_has_not_is_refused(
    live_package: Package, program: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    model, publisher = new_trainer(live_package, log)
    publisher.close()
    model.register_buffer("other", torch.ones(3))
    publisher.attach(model, base=base_of(live_package.path))
    before = sum_of(answer(model, inputs()))
    with publisher:
        train(model, 1, dense=True)
        publish(publisher)
    with versions_program.following(program, live_package.path, log) as follower:
        said = follower.update()
        assert "changes the dense tensor 'other', which the package" in said["versions"]["refused"]
        assert (said["versions"]["outputs"], said["versions"]["sequence"]) == (before, 0)
        assert (said["model"]["applied"], said["model"]["behind"]) == (1, 1)
    folder = with_manifest(live_package, tmp_path / "unused", unused=["model.other"])
    with versions_program.following(program, folder, log) as follower:
        assert follower.update()["versions"]["outputs"] == sum_of(answer(model, inputs()))


@pytest.mark.parametrize(
    "crafted", [{"bytes": 0}, {"bytes": 47}, {"bytes": 1 << 63}, {"base_sequence": (1 << 64) - 1}]
)
def test_heads_with_numbers_that_no_batch_has_are_told(
    live_package: Package, program: Path, tmp_path: Path, crafted: dict[str, int]
) -> None:
    log = tmp_path / "log"
    model, publisher = new_trainer(live_package, log)
    with publisher:
        train(model, 1)
        publish(publisher)
    (file,) = log.rglob("*.delta")
    data = file.read_bytes()
    head = batch_format.head_of(data)
    assert head is not None
    text = batch_format._head_bytes(head._replace(**crafted))
    file.write_bytes(text + data[len(text) :])
    with versions_program.following(program, live_package.path, log) as follower:
        said = follower.update()
        assert "byte 0: its head says that" in said["versions"]["damaged"]


@pytest.mark.long
def test_torn_tails_are_no_commits_and_damage_is_told(
    live_package: Package, program: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    model, publisher = new_trainer(live_package, log)
    with publisher:
        for number in (1, 2):
            train(model, number)
            publish(publisher)
    (file,) = log.rglob("*.delta")
    with Segment(file, last=True) as segment:
        second = list(segment.heads())[1]
    whole = file.read_bytes()
    for end in (second.begin + 50, second.begin + 1000, second.end - 30):
        os.truncate(file, end)
        with versions_program.following(program, live_package.path, log) as follower:
            assert follower.update()["versions"]["sequence"] == 1, end
        file.write_bytes(whole)
    unwritten = whole[: second.begin + 600] + bytes(len(whole) - second.begin - 600)
    damaged = bytearray(whole)
    damaged[second.begin + 200] ^= 1
    for data, sequence in [(unwritten, 1), (damaged, 1)]:
        file.write_bytes(data)
        with versions_program.following(program, live_package.path, log) as follower:
            said = follower.update()["versions"]
            assert said["sequence"] == sequence
            assert ("damaged" in said) == (data is damaged), said
