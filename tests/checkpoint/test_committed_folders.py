"""Folders that are replaced as a whole, where each call of the disk goes wrong in turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from uuid import uuid4

import pytest
from lost_answers import Faults, FaultyCalls

from torch_dynemb.files.checksummed_files import write_file
from torch_dynemb.files.claim import Claim
from torch_dynemb.files.commit import claimed, commit, is_taken, new_files, uuid_at
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location

pytestmark = pytest.mark.cpu_only("is about files, which know no device")


def nothing(path: Location) -> None:
    """Anything may be replaced."""


def absent(path: Location) -> None:
    if is_taken(path):
        raise FileExistsError(str(path))


def replace(disk: Disk, path: Path, text: str, check: object = nothing) -> None:
    uuid = uuid4().hex
    with claimed("test", disk, path, uuid):
        files = new_files(path, uuid)
        disk.make_folder(files)
        write_file(disk, files / "rows", text.encode())
        manifest = json.dumps({"uuid": uuid}).encode()
        commit(disk, path, uuid, manifest, check, [files])  # type: ignore[arg-type]


def found(path: Path) -> str | None:
    """What the files of a folder hold, which must have no others; None: it does not exist."""
    assert [of.name for of in path.parent.iterdir()] == ([path.name] if path.exists() else [])
    if not path.exists():
        return None
    uuid = uuid_at(path)
    assert uuid is not None
    assert {of.name for of in path.iterdir()} == {"manifest.json", uuid}
    return (path / uuid / "rows").read_text()


def calls_of(path: Path) -> list[str]:
    counted = Faults()
    replace(FaultyCalls(counted), path, "new")
    return counted.seen


@pytest.fixture(params=["new", "replaced"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder, which exists in the second case."""
    path = tmp_path / "place" / "last"
    path.parent.mkdir()
    if request.param == "replaced":
        replace(Disk(), path, "old")
    return path


def test_a_lost_answer_of_a_rename_is_no_error(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path.parent, tmp_path / "kept")
    calls = calls_of(path)
    renames = [number for number, call in enumerate(calls, 1) if call == "rename"]
    assert len(renames) == (2 if (tmp_path / "kept" / "last").exists() else 1)
    for number in renames:
        shutil.rmtree(path.parent)
        shutil.copytree(tmp_path / "kept", path.parent)
        replace(FaultyCalls(Faults(number, "lost")), path, "new")
        assert found(path) == "new"


def test_an_error_leaves_what_was_there(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path.parent, tmp_path / "kept")
    before = found(path)
    calls = calls_of(path)
    for number, call in enumerate(calls, 1):
        if call in ("close", "remove"):  # after which nothing can fail
            continue
        shutil.rmtree(path.parent)
        shutil.copytree(tmp_path / "kept", path.parent)
        with pytest.raises(OSError, match="the call has failed"):
            replace(FaultyCalls(Faults(number)), path, "new")
        assert found(path) == before, f"call {number} of {calls}"


def test_drafts_of_dead_writers_are_removed(path: Path) -> None:
    draft = path.with_name(f"{path.name}.tmp-{uuid4().hex}")
    (draft / "tables").mkdir(parents=True)
    Claim(draft).release()
    replace(Disk(), path, "new")
    assert found(path) == "new"


def test_a_checkpoint_of_its_own_within_a_folder_stays(path: Path) -> None:
    replace(Disk(), path, "old")
    (path / uuid4().hex).mkdir()  # left by a dead save
    inner = path / uuid4().hex  # the name of a run, say
    replace(Disk(), inner, "inner")
    replace(Disk(), path, "new")
    assert (inner / str(uuid_at(inner)) / "rows").read_text() == "inner"
    shutil.rmtree(inner)
    assert found(path) == "new"


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "last"
    replace(Disk(), path, "other")
    with pytest.raises(FileExistsError):
        replace(Disk(), path, "new", absent)
    assert found(path) == "other"
