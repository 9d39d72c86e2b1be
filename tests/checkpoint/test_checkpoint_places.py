"""What lies where a checkpoint is saved: of the user, of dead saves, of other processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import torch_dynemb as td
from torch_dynemb.checkpoint.file_names import UNFINISHED
from torch_dynemb.checkpoint.saving import save as saving
from torch_dynemb.files.claim import Claim, Writer, writer_of
from torch_dynemb.files.disk import Disk

pytestmark = pytest.mark.cpu_only("is about files, which know no device")

UUID = "0123456789abcdef" * 2


def trained(first: int = 0) -> td.DynamicEmbedding:
    module = td.DynamicEmbedding(4, name="ads", optimizer=td.SGD(lr=0.1))
    module(torch.arange(first, first + 20)).sum().backward()
    return module


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def make_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("precious")
    return path


@pytest.mark.parametrize("name", ["old-monday", "tmp-notes", f"old-{UUID}", f"tmp-{UUID}"])
def test_folders_of_the_user_beside_a_checkpoint_stay(name: str, tmp_path: Path) -> None:
    theirs = make_file(tmp_path / f"last.{name}/thesis.txt")
    for _ in range(2):
        td.checkpoint.save(tmp_path / "last", trained())
    assert theirs.read_text() == "precious"


def test_a_backup_beside_a_checkpoint_is_neither_removed_nor_loaded(tmp_path: Path) -> None:
    td.checkpoint.save(tmp_path / "last", trained())
    (tmp_path / "last").rename(tmp_path / "last.old-monday")
    with pytest.raises(FileNotFoundError, match="it does not exist"):
        td.checkpoint.load(tmp_path / "last", trained())
    td.checkpoint.save(tmp_path / "last", trained())
    assert names(tmp_path) == ["last", "last.old-monday"]


@pytest.mark.parametrize(
    "text", ['{"name": "an app"}', "no JSON", '{"format": "torch_dynemb package"}', "[1]"]
)
def test_a_folder_with_another_manifest_is_not_replaced(text: str, tmp_path: Path) -> None:
    make_file(tmp_path / "site/source.py")
    (tmp_path / "site/manifest.json").write_text(text)
    with pytest.raises(FileExistsError, match="exists but is not a checkpoint"):
        td.checkpoint.save(tmp_path / "site", trained())
    assert names(tmp_path / "site") == ["manifest.json", "source.py"]


def test_files_of_the_user_stay_in_the_next_checkpoint(tmp_path: Path) -> None:
    last = tmp_path / "last"
    td.checkpoint.save(last, trained())
    before = td.checkpoint.open(last).uuid
    theirs = ("notes.txt", "plots/loss.png", "embedding/notes.txt")
    for name in theirs:
        make_file(last / name)
    td.checkpoint.save(last, trained(5))
    assert td.checkpoint.open(last).uuid != before
    assert [(last / name).read_text() for name in theirs] == ["precious"] * 3
    assert names(tmp_path) == ["last"]


def test_what_dead_saves_left_in_a_checkpoint_is_removed(tmp_path: Path) -> None:
    last = tmp_path / "last"
    td.checkpoint.save(last, trained())
    theirs = make_file(last / "plots" / "loss.png")
    left = make_file(last / UUID / "ads" / "rows").parent.parent
    (last / UNFINISHED).touch()  # of a save that died before it removed it
    td.checkpoint.save(last, trained(5))
    assert not left.exists()
    assert theirs.read_text() == "precious"
    assert names(last) == sorted(["manifest.json", "plots", td.checkpoint.open(last).uuid])


@pytest.mark.long
def test_a_second_save_to_a_path_names_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = (
        "import sys, torch_dynemb as td; "
        "td.checkpoint.save(sys.argv[1], td.DynamicEmbedding(4, trainable=False))"
    )
    last = tmp_path / "last"
    told: list[str] = []

    class DiskBesideAnother(Disk):
        def create(self, path: Path) -> int:
            if not told:
                run = subprocess.run(
                    [sys.executable, "-c", second, str(last)], capture_output=True, text=True
                )
                told.append(run.stderr)
            return super().create(path)

    monkeypatch.setattr(saving, "_DISK", DiskBesideAnother())
    td.checkpoint.save(last, trained())
    assert f"InUseError: checkpoint.save: another process (pid {os.getpid()} on " in told[0]
    assert f"is saving to {last} now" in told[0]
    assert names(tmp_path) == ["last"]
    assert UNFINISHED not in names(last)


@pytest.mark.long
def test_a_claim_ends_with_its_process_though_a_child_lives(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    program = """
import os, sys
from pathlib import Path
from torch_dynemb.files.claim import Claim
claim = Claim(Path(sys.argv[1]))
if os.fork() == 0:
    os.write(1, b"a")
    os.read(0, 1)
    os._exit(0)
os.read(0, 1)
os._exit(0)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "there")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.read(1) == b"a"
    writer, owner = writer_of(tmp_path / "there")
    assert writer == Writer.ALIVE
    assert f"another process (pid {process.pid} on " in owner
    process.kill()
    process.wait()
    assert writer_of(tmp_path / "there")[0] == Writer.DEAD  # the child still waits
    process.stdin.close()


def test_a_claim_of_another_thread_says_so(tmp_path: Path) -> None:
    claim = Claim(tmp_path)
    found: list[tuple[Writer, str]] = []
    thread = threading.Thread(target=lambda: found.append(writer_of(tmp_path)))
    thread.start()
    thread.join()
    assert found[0][0] == Writer.ALIVE
    assert "another thread of this process" in found[0][1]
    claim.release(tmp_path)
    assert writer_of(tmp_path) == (Writer.NONE, "")


def test_ranks_that_ask_for_a_writer_do_not_take_each_other_for_one(tmp_path: Path) -> None:
    Claim(tmp_path).release()  # of a save that has failed
    with (tmp_path / UNFINISHED).open() as asked:
        fcntl.flock(asked, fcntl.LOCK_SH)  # another rank asks just now
        assert writer_of(tmp_path)[0] == Writer.DEAD


@pytest.mark.parametrize("error", [errno.EACCES, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("call", ["stat", "listdir"])
def test_what_cannot_be_found_out_is_not_missing(
    call: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = tmp_path / "last"
    td.checkpoint.save(last, trained())
    real = getattr(os, call)

    def failing(path: object, *arguments: object, **more: object) -> object:
        if isinstance(path, Path) and path.is_relative_to(tmp_path):
            raise OSError(error, os.strerror(error), str(path))
        return real(path, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        uses = (td.checkpoint.load, td.checkpoint.save)  # a load lists no folder
        for use in uses if call == "stat" else uses[1:]:
            with pytest.raises(OSError, match=os.strerror(error)) as raised:
                use(last, trained())
            assert str(raised.value.filename).startswith(str(tmp_path))
    assert names(tmp_path) == ["last"]
    td.checkpoint.load(last, trained())


@pytest.mark.parametrize(
    ("text", "why"),
    [("[]," * 5_000_000 + "[]", "5000003 lists"), ("[" * 100_000 + "]" * 100_000, "not JSON")],
)
def test_a_manifest_larger_than_any_is_refused_before_it_is_parsed(
    text: str, why: str, tmp_path: Path
) -> None:
    head = json.dumps({"format": "torch_dynemb checkpoint", "version": 1})[:-1]
    (tmp_path / "manifest.json").write_text(f'{head}, "x": [{text}]}}')
    with pytest.raises(ValueError, match=why):
        td.checkpoint.load(tmp_path, trained())


def test_a_manifest_of_too_many_bytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="it has 1099511627776 bytes, expected at most"):
        td.checkpoint.load(tmp_path, trained())


def test_what_a_save_has_begun_and_left_is_removed(tmp_path: Path) -> None:
    """A process may die before its folder has a claim."""
    bag = td.DynamicEmbeddingBag(4, optimizer=td.SGD(lr=0.1), name="ads")
    empty, begun, filled = (tmp_path / f"model.tmp-{digit * 32}" for digit in "abc")
    for folder in (empty, begun, filled):
        folder.mkdir()
    for folder in (begun, filled):
        (folder / f"{UNFINISHED}.new").touch()
    (filled / "notes.txt").write_text("of the user")
    td.checkpoint.save(tmp_path / "model", bag)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "model", filled]
