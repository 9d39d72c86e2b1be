"""``save(keep_last=)``: which checkpoints stay, beside a dict of what a program has saved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import fsspec
import pytest
import torch

import torch_dynemb as td
from torch_dynemb import checkpoint
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location
from torch_dynemb.files.uploads import UrlDisk

pytestmark = pytest.mark.cpu_only("is about file systems")

STORE = fsspec.filesystem("memory")


@pytest.fixture(params=["disk", "url"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path) if request.param == "disk" else "memory://bucket/run"
    STORE.store.clear()
    STORE.pseudo_dirs[:] = [""]


def new_model() -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({"users": td.DynamicEmbedding(2, optimizer=td.SGD(lr=0.1))})


def names(folder: str) -> set[str]:
    """The names of all checkpoints; nothing is beside them."""
    store, path = fsspec.core.url_to_fs(folder)
    found = {str(of).rpartition("/")[2] for of in store.ls(path, detail=False)}
    for name in found:
        checkpoint.open(f"{folder}/{name}")
    return found


@pytest.mark.parametrize("seed", range(2))
def test_what_stays(folder: str, seed: int) -> None:
    """Two models, of which each continues its own checkpoints, or those that it loads."""
    draw = random.Random(seed)
    models = [new_model(), new_model()]
    series: list[list[str]] = [[], []]  # names, oldest first
    saved_with: dict[str, list[str]] = {}  # by name: the series in its manifest
    number = 0
    for _ in range(25):
        which = draw.randrange(2)
        if saved_with and draw.random() < 0.2:
            name = draw.choice(sorted(saved_with))
            models[which] = new_model()
            checkpoint.load(f"{folder}/{name}", models[which])
            series[which] = list(saved_with[name])
        else:
            number += 1
            keep_last = draw.choice([None, 1, 2, 3])
            name = draw.choice([f"step-{number}", "last", "best"])
            handle = checkpoint.save(
                f"{folder}/{name}",
                models[which],
                keep_last=keep_last,
                asynchronous=draw.random() < 0.5,
            )
            handle.wait()
            gone = {name}
            if keep_last is not None:
                own = [*(of for of in series[which] if of != name), name]
                gone |= set(own[:-keep_last])
            for old in gone:
                saved_with.pop(old, None)
                for of in (*series, *saved_with.values()):
                    of[:] = [one for one in of if one != old]
            if keep_last is not None:
                series[which].append(name)
            saved_with[name] = list(series[which])
        assert names(folder) == set(saved_with)
    for name in saved_with:
        checkpoint.load(f"{folder}/{name}", new_model())


def test_files_of_others_stay_and_a_failed_removal_is_repeated(folder: str) -> None:
    model = new_model()
    store, path = fsspec.core.url_to_fs(folder)
    checkpoint.save(f"{folder}/0", model, keep_last=1)
    store.pipe_file(f"{path}/0/notes.txt", b"loss 0.3")
    kind = Disk if folder.startswith("/") else UrlDisk
    remove = kind.remove

    def fail_for_old(disk: Disk, place: Location) -> None:
        if "/0/" not in str(place):
            remove(disk, place)

    with mock.patch.object(kind, "remove", fail_for_old):
        checkpoint.save(f"{folder}/1", model, keep_last=1)
    with pytest.raises(FileNotFoundError):
        checkpoint.open(f"{folder}/0")  # it begins with the manifest
    assert len(store.ls(f"{path}/0", detail=False)) == 2
    other = new_model()
    checkpoint.load(f"{folder}/1", other)
    checkpoint.save(f"{folder}/2", other, keep_last=1)
    assert store.cat_file(f"{path}/0/notes.txt") == b"loss 0.3"
    [left] = store.ls(f"{path}/0", detail=False)
    assert str(left).endswith("/notes.txt")
    assert not store.exists(f"{path}/1")
    checkpoint.load(f"{folder}/2", new_model())


def test_wrong_arguments(tmp_path: Path) -> None:
    model = new_model()
    with pytest.raises(ValueError, match=r"keep_last is 0, expected .*at least 1"):
        checkpoint.save(tmp_path / "a", model, keep_last=0)
    td.checkpoint.record_changes(model)
    checkpoint.save(tmp_path / "a", model)
    with pytest.raises(ValueError, match="an increment needs the checkpoint before it"):
        checkpoint.save(tmp_path / "b", model, keep_last=2, since=tmp_path / "a")
    assert {of.name for of in tmp_path.iterdir()} == {"a"}
