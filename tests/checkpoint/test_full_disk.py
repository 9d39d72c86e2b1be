"""A disk without room, or that fails: the error says what to do, and the old checkpoint stays."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faulty_disk import FaultyDisk, FullDisk
from whole_model import WholeModel, content, same

from torch_dynemb import checkpoint

pytestmark = pytest.mark.cpu_only("is about files, which know no device")

SAVE = sys.modules["torch_dynemb.checkpoint.saving.save"]
TOLD = r"after \d+ bytes of .*, \d+ bytes are free: make room, or save elsewhere"


@pytest.fixture(scope="module")
def models() -> tuple[WholeModel, WholeModel]:
    old, new = WholeModel(), WholeModel()
    old.train_steps(range(2))
    new.train_steps(range(2, 4))
    return old, new


@pytest.fixture
def last(models: tuple[WholeModel, WholeModel], tmp_path: Path) -> Path:
    """The checkpoint of the first model."""
    checkpoint.save(tmp_path / "last", models[0])
    return tmp_path / "last"


def assert_untouched(path: Path, model: WholeModel) -> None:
    loaded = WholeModel()
    checkpoint.load(path, loaded)
    assert same(content(loaded), content(model))
    assert list(path.parent.iterdir()) == [path]


CALLS = {
    "first write": ("write_at", 1),
    "a write": ("write_at", 20),
    "a later write": ("write_at", 60),
    "sync of a file": ("sync", 3),
    "a folder": ("make_folder", 1),
    "the folder of a table": ("make_folder", 3),
    "a file": ("create", 2),
    "sync of a folder": ("sync_folder", 2),
    "its files beside the old ones": ("rename", 1),
    "its manifest in place of the old one": ("rename", 2),
    "sync of the folder of a table": ("sync_folder", 5),
    "sync of the draft": ("sync_folder", 8),
    "sync of the name of its files": ("sync_folder", 9),
    "sync of its manifest": ("sync_folder", 10),
}


@pytest.mark.parametrize("call", CALLS)
def test_full_disk_is_told_in_bytes_and_leaves_the_old_one(
    call: str,
    models: tuple[WholeModel, WholeModel],
    last: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SAVE, "_DISK", FullDisk(*CALLS[call]))
    with pytest.raises(OSError, match=TOLD) as raised:
        checkpoint.save(last, models[1])
    assert raised.value.errno == errno.ENOSPC
    assert str(raised.value.filename).startswith(f"{last}.tmp-")
    monkeypatch.undo()
    assert_untouched(last, models[0])


@pytest.mark.parametrize("call", CALLS)
def test_disk_that_fails_leaves_the_old_one(
    call: str,
    models: tuple[WholeModel, WholeModel],
    last: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SAVE, "_DISK", FullDisk(*CALLS[call], error=errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.save(last, models[1])
    monkeypatch.undo()
    assert_untouched(last, models[0])


def test_full_disk_without_an_old_one_leaves_nothing(
    models: tuple[WholeModel, WholeModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk()
    monkeypatch.setattr(SAVE, "_DISK", disk)
    checkpoint.save(tmp_path / "tried", models[1])
    for method in ("write_at", "sync_folder", "rename"):
        monkeypatch.setattr(SAVE, "_DISK", FullDisk(method, disk.calls.count(method)))
        with pytest.raises(OSError, match=TOLD):
            checkpoint.save(tmp_path / "new", models[1])
    assert list(tmp_path.iterdir()) == [tmp_path / "tried"]


def test_background_save_reports_a_full_disk(
    models: tuple[WholeModel, WholeModel], last: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SAVE, "_DISK", FullDisk("write_at", 10))
    handle = checkpoint.save(last, models[1], asynchronous=True)
    with pytest.raises(OSError, match=TOLD):
        handle.wait()
    monkeypatch.undo()
    assert_untouched(last, models[0])


LIMITED = """
import resource, sys
import torch, torch_dynemb as td
bag = td.DynamicEmbeddingBag(16, optimizer=td.SGD(lr=0.1))
bag(torch.arange(2000)[None])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    td.checkpoint.save(sys.argv[1], bag)
except OSError as error:
    print(error)
"""


@pytest.mark.long
def test_limit_of_the_size_of_files_is_told(tmp_path: Path) -> None:
    """A real one, by RLIMIT_FSIZE: the kernel writes a part and then refuses."""
    checkpoint.save(tmp_path / "last", torch.nn.Linear(2, 2))
    told = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "last")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "File too large after 50000 bytes of r000-of-001.c000-016.p0000.safetensors" in told
    assert r"raise the limit of the size of files (ulimit -f); the checkpoint from" in told
    checkpoint.load(tmp_path / "last", torch.nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == [tmp_path / "last"]
