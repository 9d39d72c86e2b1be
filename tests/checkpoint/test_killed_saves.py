"""A save that dies at any call of the file system leaves the old checkpoint or the new one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from faulty_disk import LEAVES, FaultyDisk, Killed
from whole_model import WholeModel, content, same

from torch_dynemb import checkpoint
from torch_dynemb.files.disk import Disk

pytestmark = pytest.mark.cpu_only("is about files, which know no device")

SAVE = sys.modules["torch_dynemb.checkpoint.saving.save"]


@pytest.fixture(scope="module")
def small_pieces() -> Iterator[None]:
    """Several blocks, files and writes of few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, size in (
            ("files.checksummed_files", "BLOCK_BYTES", 6000),
            ("rows.read", "BATCH_BYTES", 4000),
            ("checkpoint.reading.saved_rows", "PIECE_BYTES", 1500),
            ("checkpoint.saving.table_files", "FILE_BYTES", 3000),
        ):
            patch.setattr(sys.modules[f"torch_dynemb.{module}"], name, size)
        yield


class Saved(NamedTuple):
    """Two models, and what they hold; the first one's checkpoint."""

    old: WholeModel
    new: WholeModel
    contents: tuple[dict[str, Any], dict[str, Any]]
    folder: Path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, small_pieces: None) -> Saved:
    old, new = WholeModel(), WholeModel()
    old.train_steps(range(2))
    new.train_steps(range(2, 5))
    folder = tmp_path_factory.mktemp("old") / "last"
    checkpoint.save(folder, old, state={"epoch": 0})
    return Saved(old, new, (content(old), content(new)), folder)


def save_on(disk: Disk, path: Path, model: WholeModel, epoch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SAVE, "_DISK", disk)
        checkpoint.save(path, model, state={"epoch": epoch, "more": torch.arange(300)})


def save_killed(disk: FaultyDisk, path: Path, model: WholeModel, epoch: int) -> bool:
    """Whether it died."""
    try:
        save_on(disk, path, model, epoch)
    except Killed:
        disk.crash()
        return True
    return False


def found(path: Path, contents: tuple[dict[str, Any], dict[str, Any]]) -> int | None:
    """Which of the contents a checkpoint has, as a whole; None: there is none."""
    model = WholeModel()
    try:
        report = checkpoint.load(path, model)
    except FileNotFoundError:
        return None
    epoch: int = report.state["epoch"]
    assert same(content(model), contents[epoch])
    return epoch


# -- what there is before the save that dies -----------------------------------------------------


def nothing(saved: Saved, path: Path) -> None:
    """A first save, into folders that are not there either."""


def old_one(saved: Saved, path: Path) -> None:
    shutil.copytree(saved.folder, path, copy_function=os.link)


def killed_before(call: str, last: int = 0) -> Callable[[Saved, Path], None]:
    """The old one, and what a save has left that died at its last call of a kind, or before."""

    def prepare(saved: Saved, path: Path) -> None:
        old_one(saved, path)
        disk = FaultyDisk()
        save_on(disk, path, saved.old, 0)
        numbers = [number for number, of in enumerate(disk.calls, 1) if of == call]
        assert save_killed(FaultyDisk(numbers[-1 - last]), path, saved.old, 0)

    return prepare


BEFORE = {
    "nothing": nothing,
    "old": old_one,
    "half written": killed_before("create"),
    "before the renames": killed_before("rename", 1),
    "between renames": killed_before("rename"),
    "half removed": killed_before("remove", 1),
    "with its claim": killed_before("remove"),
}


def check_points(
    saved: Saved, folder: Path, before: str, points: Iterable[tuple[int, str]], check_next: int
) -> int:
    """Kills a save at every point in turn; returns how many there were.

    Args:
        saved: the models.
        folder: to work in.
        before: key of ``BEFORE``.
        points: number of the call, and what a failure leaves.
        check_next: the next save is tried after every so manyth point.
    """
    template = folder / "template"
    template.mkdir()
    BEFORE[before](saved, template / "last")
    allowed = {1, None} if before == "nothing" else {0, 1}
    ended = 0
    for number, leaves in points:
        place, graveyard = folder / "place", folder / "graveyard"
        graveyard.mkdir()
        shutil.copytree(template, place, copy_function=os.link)
        # so that it makes folders above, too, where there is nothing
        path = place / "a" / "b" / "last" if before == "nothing" else place / "last"
        disk = FaultyDisk(number, leaves, graveyard)
        died = save_killed(disk, path, saved.new, 1)
        epoch = found(path, saved.contents)
        where = f"{before}, call {number} ({disk.calls[-1]}), {leaves} left"
        assert epoch in allowed if died else epoch == 1, where
        names_change = disk.calls[-1] in ("rename", "remove", "sync_folder")
        if number % check_next == 0 or names_change:
            save_on(FaultyDisk(), path, saved.new, 1)
            assert found(path, saved.contents) == 1, where
            assert [entry.name for entry in path.parent.iterdir()] == ["last"], where
            uuid = checkpoint.open(path).uuid
            assert {entry.name for entry in path.iterdir()} == {"manifest.json", uuid}, where
        shutil.rmtree(place)
        shutil.rmtree(graveyard)
        ended += died
    return ended


def calls_of(saved: Saved, folder: Path, before: str) -> list[str]:
    """Of a save that does not die."""
    path = folder / "tried" / "last"
    path.parent.mkdir()
    BEFORE[before](saved, path)
    disk = FaultyDisk()
    save_on(disk, path, saved.new, 1)
    return disk.calls


def test_save_has_points_of_every_kind(saved: Saved, tmp_path: Path) -> None:
    calls = calls_of(saved, tmp_path, "old")
    kinds = {"make_folder", "create", "write_at", "sync", "close", "sync_folder", "remove"}
    assert set(calls) == kinds | {"rename"}
    assert len(calls) > 100


@pytest.mark.long_cases("old-1", "half written-17")
@pytest.mark.parametrize(("before", "step"), [("old", 1), ("nothing", 7), ("half written", 17)])
def test_killed_at_a_call(before: str, step: int, saved: Saved, tmp_path: Path) -> None:
    """Of writes, every third; :func:`test_killed_at_every_call` has all of them."""
    calls = calls_of(saved, tmp_path, before)
    numbers = {*range(1, len(calls) + 1, step), *range(len(calls) - 5, len(calls) + 1)}
    points = [
        (number, LEAVES[number % len(LEAVES)])
        for number in sorted(numbers)
        if calls[number - 1] != "write_at" or number % 3 == 0
    ]
    assert check_points(saved, tmp_path, before, points, 12) == len(points)


@pytest.mark.parametrize("before", BEFORE)
def test_what_was_saved_survives_a_power_failure(before: str, saved: Saved, tmp_path: Path) -> None:
    BEFORE[before](saved, tmp_path / "last")
    path = tmp_path / ("a/b/last" if before == "nothing" else "last")
    graveyard = tmp_path / "graveyard"
    graveyard.mkdir()
    disk = FaultyDisk(0, "synced", graveyard)
    save_on(disk, path, saved.new, 1)
    disk.crash()
    assert found(path, saved.contents) == 1


@pytest.mark.long
@pytest.mark.parametrize("before", ["between renames", "half removed"])
def test_killed_while_it_settles_what_a_killed_one_left(
    before: str, saved: Saved, tmp_path: Path
) -> None:
    points = [(number, leaves) for number in range(1, 6) for leaves in LEAVES]
    assert check_points(saved, tmp_path, before, points, 1) == len(points)


@pytest.mark.long
@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize("before", BEFORE)
def test_killed_at_every_call(before: str, leaves: str, saved: Saved, tmp_path: Path) -> None:
    calls = calls_of(saved, tmp_path, before)
    points = [(number, leaves) for number in range(1, len(calls) + 1)]
    assert check_points(saved, tmp_path, before, points, 1) == len(points)
