"""Checkpoints at URLs of fsspec: what they have, and that each is whole or absent."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
import torch
from changing_tables import dense_files, train
from checkpoint_content import same, saved_content, trained_model
from failing_bucket import Dead, failing
from fsspec.implementations.memory import MemoryFileSystem

import torch_dynemb as td
from torch_dynemb import checkpoint, delta_log, errors
from torch_dynemb.__main__ import main
from torch_dynemb.files import byte_files, uploads
from torch_dynemb.files.object_store import ObjectStore

pytestmark = pytest.mark.cpu_only("is about file systems")

URL = "memory://bucket/last"
STORE = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def empty_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few bytes make several files, parts of a file, and blocks."""
    monkeypatch.setattr(uploads.UrlDisk, "file_bytes", 20_000)
    monkeypatch.setattr(uploads.UrlDisk, "block_bytes", 3000)
    monkeypatch.setattr(uploads, "PART_BYTES", 10_000)
    monkeypatch.setattr(byte_files, "_RANGE_BYTES", 1000)
    yield
    STORE.store.clear()
    STORE.pseudo_dirs[:] = [""]


def content_of(path: Any) -> tuple[Any, Any]:
    return saved_content(path), dense_files(path)


def files() -> set[str]:
    return {str(name) for name in STORE.store}


@pytest.fixture(scope="module")
def model() -> torch.nn.ModuleDict:
    return trained_model()


def test_a_url_has_what_a_path_has(tmp_path: Path, model: torch.nn.ModuleDict) -> None:
    state = {"epoch": 3, "moments": torch.arange(9_000.0)}
    checkpoint.save(tmp_path / "last", model, state=state)
    handle = checkpoint.save(URL, model, state=state)
    assert str(handle.path) == URL
    assert same(content_of(URL), content_of(tmp_path / "last"))
    for asynchronous in (False, True):
        checkpoint.save(URL, model, state=state, asynchronous=asynchronous).wait()
        loaded = trained_model(steps=1, ids=20)
        report = checkpoint.load(URL, loaded)
        assert same(report.state, state)
        assert all(table.exact for table in report.tables.values())
        checkpoint.save(tmp_path / "loaded", loaded, state=state)
        assert same(content_of(tmp_path / "loaded"), content_of(tmp_path / "last"))
    # the files of replaced checkpoints are gone; a copy on the local disk is a checkpoint
    assert len({name.split("/")[3] for name in files()}) == 2
    STORE.get("/bucket/last", str(tmp_path / "copy"), recursive=True)
    assert same(content_of(tmp_path / "copy"), content_of(tmp_path / "last"))
    checkpoint.save(tmp_path / "copy", model)
    uuid = checkpoint.open(tmp_path / "copy").uuid
    assert {of.name for of in (tmp_path / "copy").iterdir()} == {"manifest.json", uuid}


def test_tools_take_urls(
    tmp_path: Path, model: torch.nn.ModuleDict, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = trained_model()
    checkpoint.record_changes(changed)
    checkpoint.save(URL, changed)
    checkpoint.save(tmp_path / "local", changed)
    train(changed["tables"], 1)
    checkpoint.save(tmp_path / "whole", changed)
    with pytest.raises(errors.NewBaseNeededError):
        checkpoint.save("memory://bucket/more", changed, since=URL)
    checkpoint.save(URL, changed)
    train(changed["tables"], 2)
    checkpoint.save("memory://bucket/more", changed, since=URL)
    checkpoint.save(tmp_path / "whole", changed)
    merged = "memory://bucket/merged"
    checkpoint.merge([URL, "memory://bucket/more"], merged, parts=3)
    assert same(saved_content(merged), saved_content(tmp_path / "whole"))
    assert main(["checkpoint", "reshard", merged, "memory://bucket/two", "--parts", "2"]) == 0
    assert main(["checkpoint", "reshard", merged, str(tmp_path / "two"), "--parts", "2"]) == 0
    assert same(content_of("memory://bucket/two")[0], content_of(tmp_path / "two")[0])
    with pytest.raises(FileExistsError):
        checkpoint.reshard(merged, "memory://bucket/two", parts=2)
    assert main(["checkpoint", "verify", merged]) == 0
    assert main(["inspect", merged]) == 0
    assert f"{merged}: full checkpoint" in capsys.readouterr().out
    arguments = {"file_format": "parquet", "tables": ["tables.users", "tables.items"]}
    checkpoint.export(merged, "memory://bucket/out", **arguments)  # type: ignore[arg-type]
    checkpoint.export(merged, tmp_path / "out", **arguments)  # type: ignore[arg-type]
    for file in (of for of in (tmp_path / "out").rglob("*") if of.is_file()):
        assert STORE.cat(f"/bucket/out/{file.relative_to(tmp_path / 'out')}") == file.read_bytes()
    with pytest.raises(FileExistsError):
        checkpoint.export(merged, "memory://bucket/out", file_format="npz")
    with failing(2), pytest.raises(OSError, match="the store has failed"):
        checkpoint.export(merged, "memory://bucket/npz", file_format="npz")
    assert not any("npz" in name for name in files())


def test_files_of_dead_saves_are_removed_after_a_day(model: torch.nn.ModuleDict) -> None:
    top = torch.nn.ModuleDict({"top": torch.nn.Linear(3, 2)})
    with failing(2, dead=True), pytest.raises(Dead):
        checkpoint.save(URL, top)
    [left] = files()
    checkpoint.save(URL, top)
    assert left in files()  # its save may still run
    inner = f"{URL}/{uuid4().hex}"  # the name of a run, say
    checkpoint.save(inner, top)
    for file in STORE.store.values():
        file.modified = datetime.now(timezone.utc) - timedelta(days=2)
    checkpoint.save(URL, top)
    assert left not in files()
    checkpoint.load(inner, top)


def test_a_folder_with_other_files_is_refused(model: torch.nn.ModuleDict) -> None:
    STORE.pipe_file("/bucket/last/notes.txt", b"mine")
    with pytest.raises(FileExistsError, match="is not a checkpoint"):
        checkpoint.save(URL, model)
    assert files() == {"/bucket/last/notes.txt"}
    with pytest.raises(FileNotFoundError, match="is not a checkpoint"):
        checkpoint.load(URL, model)


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "missing"])
def test_damaged_files_are_found(damage: str, model: torch.nn.ModuleDict) -> None:
    checkpoint.save(URL, model)
    name = max((name for name in files() if "users" in name), key=lambda of: len(STORE.cat(of)))
    data = bytearray(STORE.cat(name))
    data[-5] ^= damage == "flipped"
    data = {"shorter": data[:-1], "longer": data + b"x"}.get(damage, data)
    STORE.pipe_file(name, bytes(data))
    if damage == "missing":
        STORE.rm_file(name)
    loaded = trained_model(steps=1, ids=20)
    before = {key: value.clone() for key, value in loaded.state_dict().items()}
    with pytest.raises(errors.DamagedFileError, match=name.rpartition("/")[2]) as raised:
        checkpoint.load(URL, loaded)
    assert raised.value.path == pickle.loads(pickle.dumps(raised.value)).path
    assert str(raised.value.path).startswith(URL)
    assert same(dict(loaded.state_dict()), before)
    with checkpoint.open(URL) as saved, pytest.raises(errors.DamagedFileError):
        saved.verify()


class Refusing(MemoryFileSystem):  # type: ignore[misc]
    """A store that asks for credentials."""

    protocol = ("refusing",)
    cachable = False

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        raise type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")

    info = cat_file


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        ("gs://bucket/last", ModuleNotFoundError, "pip install gcsfs"),
        ("no-such://bucket/last", ValueError, "cannot open it: Protocol not known: no-such"),
        ("simplecache::memory://bucket", ValueError, "chained URLs"),
        ("memory://", ValueError, "names no folder"),
        (Path("s3://bucket/last"), ValueError, "give URLs as text"),
        ("refusing://bucket/last", PermissionError, "Unable to locate credentials"),
    ],
)
def test_urls_that_cannot_be_used(path: Any, error: type[Exception], text: str) -> None:
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    table = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
    for call in (
        lambda: checkpoint.save(path, table),
        lambda: checkpoint.load(path, table),
        lambda: delta_log.DeltaLog(path).attach(table),
        lambda: delta_log.follow(path, table),
    ):
        with pytest.raises(error, match=text):
            call()


def test_what_has_no_url(model: torch.nn.ModuleDict) -> None:
    with pytest.raises(ValueError, match="stores lie on local disks"):
        td.SSDStore(URL)
    for call in (
        lambda: td.serving.export(model, URL, (), version="1"),
        lambda: td.serving.load(URL),
        lambda: checkpoint.snapshots(URL),
        lambda: delta_log.DirectorySink(URL),
        lambda: td.export_vectors(model["tables"], "users", URL),
    ):
        with pytest.raises(ValueError, match="give a path of the local disk"):
            call()
    assert files() == set()


def test_uploads_hold_a_bounded_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(uploads, "PART_BYTES", 1 << 16)
    monkeypatch.setattr(uploads.UrlDisk, "file_bytes", 60_000)
    items = td.DynamicEmbedding(16, optimizer=td.SGD(lr=0.1))
    items(torch.arange(20_000))
    put, lock, together = ObjectStore.put, threading.Lock(), threading.Barrier(3)
    sizes: list[int] = []
    now = most = 0

    def seen(store: ObjectStore, url: str, data: bytes) -> None:
        nonlocal now, most
        with lock:
            sizes.append(len(data))
            number, now = len(sizes), now + 1
            most = max(most, now)
        if number <= 3:
            together.wait()  # three are sent at once
        put(store, url, data)
        with lock:
            now -= 1

    monkeypatch.setattr(ObjectStore, "put", seen)
    checkpoint.save(URL, items)
    assert most == 3
    assert len(sizes) > 20
    assert max(sizes) <= 1 << 16
    assert same(saved_content(URL)["embedding"].ids, torch.arange(20_000))
