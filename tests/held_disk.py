"""Disks that wait or fail when a test says so, and files of checkpoints, to be compared."""

from __future__ import annotations

import errno
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from torch_dynemb.checkpoint.saving import handle
from torch_dynemb.files.disk import Disk

SECONDS = 60  # after which a test that waits for ever fails


class HeldDisk(Disk):
    """Files are made when the test lets go of the disk: until then a save goes on.

    Attributes:
        reached: a save has come to its first file.
        error: what writes raise from then on.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._let_go = threading.Event()
        self.error: BaseException | None = None

    def create(self, path: Path) -> int:
        self.reached.set()
        assert self._let_go.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return super().create(path)

    def wait_until_reached(self) -> None:
        assert self.reached.wait(SECONDS)

    def let_go(self, error: BaseException | None = None) -> None:
        self.error = error
        self._let_go.set()


@contextmanager
def held_disk(monkeypatch: pytest.MonkeyPatch, disk: HeldDisk | None = None) -> Iterator[HeldDisk]:
    """A disk that saves use while this lasts, and that none of them outlives."""
    held = HeldDisk() if disk is None else disk
    give_disk(monkeypatch, held)
    yield held
    held.let_go(held.error)
    last = handle._last
    if last is not None:
        assert last._ended.wait(SECONDS)
        last._work.unreported_error()  # left by a failed test; later tests ignore it


def full() -> OSError:
    """What a full disk raises."""
    return OSError(errno.ENOSPC, "No space left on device")


def give_disk(monkeypatch: pytest.MonkeyPatch, disk: Disk | None = None) -> None:
    """Has saves use a disk; None: the real one."""
    # the package has a function of this name
    save = sys.modules["torch_dynemb.checkpoint.saving.save"]
    monkeypatch.setattr(save, "_DISK", Disk() if disk is None else disk)


def files_of(checkpoint: Path) -> dict[str, Any]:
    """By path what the files hold; without what every save draws anew."""
    text = (checkpoint / "manifest.json").read_text()
    uuid = json.loads(text)["uuid"]
    folder = checkpoint / uuid
    found: dict[str, Any] = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = json.loads(text.replace(f"{uuid}/", ""))
    assert manifest.pop("uuid")
    assert manifest.pop("crc32c")  # of the manifest with its uuid
    found["manifest.json"] = manifest
    return found
