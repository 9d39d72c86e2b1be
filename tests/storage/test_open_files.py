"""A store opens as many of its files as the process may, and deletes only files of stores."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch_dynemb as td
from torch_dynemb.checkpoint.manifest.records import canonical
from torch_dynemb.files.checksummed_files import checksum_of_bytes

pytestmark = pytest.mark.cpu_only("files of a store")

DESCRIPTORS = 256  # of which stores take a quarter


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def table(path: Path) -> td.DynamicEmbedding:
    storage = td.SSDStore(path, segment="16KiB", cache="10 rows")
    return td.DynamicEmbedding(
        64,
        name="u",
        optimizer=td.SGD(lr=0.1),
        storage=storage,
        max_rows=20_000,
        initializer=td.Constant(0.0),
    )


def train(module: td.DynamicEmbedding, batches: int) -> None:
    for k in range(batches):
        module(torch.arange(k * 50, k * 50 + 50)).sum().backward()
        module.optimizer.step()


def open_segments(path: Path) -> int:
    """How many files of rows the process has open."""
    folder, found = Path("/proc/self/fd"), 0
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            found += os.readlink(folder / name).startswith(f"{path}/rows/")
    return found


@pytest.mark.usefixtures("few_descriptors")
def test_more_segments_than_descriptors(tmp_path: Path) -> None:
    module = table(tmp_path)
    train(module, 100)
    segments = len(list(tmp_path.glob("rows/*/*")))
    assert segments > DESCRIPTORS // 4 + 20
    ids = torch.arange(5000)
    expected = torch.full((5000, 64), -0.1)
    assert torch.allclose(module.eval()(ids), expected)  # one read of records of all files
    assert 16 <= open_segments(tmp_path) <= DESCRIPTORS // 4
    td.checkpoint.save_snapshot(module, "one")
    del module
    again = table(tmp_path)
    td.checkpoint.load_snapshot(again)
    assert open_segments(tmp_path) <= DESCRIPTORS // 4
    assert torch.allclose(again.eval()(ids), expected)


def test_a_store_goes_on_when_the_process_has_no_descriptor(tmp_path: Path) -> None:
    module = table(tmp_path)
    train(module, 20)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now, before[1]))
    taken = []
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        train(module, 60)
        assert torch.allclose(module.eval()(torch.arange(1000))[0], torch.full((64,), -0.2))
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_files_that_no_store_has_written_stay(tmp_path: Path) -> None:
    train(module := table(tmp_path), 20)
    del module
    folder = next(tmp_path.glob("rows/*"))
    names = ("notes.txt", "20261125", "2026112", "DEADBEEF")
    for name in names:
        (folder / name).write_text("of the user")
    module = table(tmp_path)  # without a snapshot it deletes the segments that are there
    train(module, 20)
    assert all((folder / name).read_text() == "of the user" for name in names)


@pytest.mark.parametrize("name", ["LOCK", "FORMAT"])
def test_files_of_others_are_not_taken_for_those_of_a_store(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("of the user")
    with pytest.raises(RuntimeError, match=f"{name} is not a file of a store: nothing has"):
        table(tmp_path)
    assert (tmp_path / name).read_text() == "of the user"
    (tmp_path / name).unlink()
    train(table(tmp_path), 2)


def test_snapshots_that_cannot_be_listed_keep_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(module := table(tmp_path), 20)
    td.checkpoint.save_snapshot(module, "one")
    del module
    before = sorted(tmp_path.glob("rows/*/*"))
    listdir = os.listdir

    def refusing(path: str | Path = ".") -> list[str]:
        if os.fspath(path).endswith("/index"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return listdir(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refusing)
        with pytest.raises(RuntimeError, match=r"/index cannot be listed \(Permission denied\)"):
            table(tmp_path)
    assert sorted(tmp_path.glob("rows/*/*")) == before
    td.checkpoint.load_snapshot(table(tmp_path))


def test_places_of_a_snapshot_do_not_size_memory(tmp_path: Path) -> None:
    train(module := table(tmp_path), 3)
    td.checkpoint.save_snapshot(module, "one")
    del module
    (file,) = tmp_path.glob("index/*/manifest.json")
    content = json.loads(file.read_text())
    content.pop("crc32c")
    content["segments"][0]["places"][0] = 1 << 25
    content["crc32c"] = checksum_of_bytes(canonical(content))
    file.write_bytes(canonical(content))
    module = table(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RuntimeError, match="which is not among the segments"):
        td.checkpoint.load_snapshot(module)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB
