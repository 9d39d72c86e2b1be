"""Disks that fail: a process that is killed at a chosen call, a power failure, no more room."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_dynemb.checkpoint.file_names import UNFINISHED
from torch_dynemb.files.disk import Disk

# What a failure leaves of what was written: all of it, as when a process is killed; all names, but
# of files only what they had when they were synced last; or only what was synced, names too.
LEAVES = ("all", "names", "synced")


class Killed(BaseException):
    """The process is dead: whatever it still does with the disk raises this again."""


@dataclass
class _Change:
    """A change of a name, and whether it survives a power failure.

    Attributes:
        kind: "folder" or "file" for what was made, "rename" or "remove".
        path: the name; of a rename the new one.
        before: of a rename the old name, of a removal the place where it is kept.
        replaced: of a rename, the place where the file is kept that had the name before.
        synced_bytes: of a file, what survives of its content.
    """

    kind: str
    path: Path
    before: Path | None = None
    replaced: Path | None = None
    durable: bool = False
    synced_bytes: int = 0


@dataclass
class FaultyDisk(Disk):
    """A disk that counts calls, and on which a process dies at one of them.

    Attributes:
        kill_at: number of the call, from 1; 0: none.
        leaves: what :meth:`crash` keeps, one of ``LEAVES``.
        graveyard: a folder for what is removed, of the same file system; needed for "synced".
        calls: their names.
    """

    kill_at: int = 0
    leaves: str = "all"
    graveyard: Path | None = None
    calls: list[str] = field(default_factory=list)
    _dead: bool = False
    _changes: list[_Change] = field(default_factory=list)
    _files: dict[int, _Change] = field(default_factory=dict)

    def _dies(self, call: str) -> bool:
        if self._dead:
            raise Killed
        self.calls.append(call)
        self._dead = len(self.calls) == self.kill_at
        return self._dead

    def _die_at(self, call: str) -> None:
        if self._dies(call):
            raise Killed

    # -- what a save calls -----------------------------------------------------------------------

    def make_folder(self, path: Path) -> None:
        self._die_at("make_folder")
        new = not path.exists()
        super().make_folder(path)
        if new:
            self._changes.append(_Change("folder", path))

    def create(self, path: Path) -> int:
        self._die_at("create")
        file = super().create(path)
        self._files[file] = _Change("file", path)
        self._changes.append(self._files[file])
        return file

    def write_at(self, file: int, data: memoryview, begin: int) -> int:
        if self._dies("write_at"):
            os.pwrite(file, data[: len(data) // 2], begin)  # torn
            raise Killed
        return super().write_at(file, data, begin)

    def sync(self, file: int) -> None:
        self._die_at("sync")  # no real one, which takes long and changes nothing that is seen
        self._files[file].synced_bytes = os.fstat(file).st_size

    def close(self, file: int) -> None:
        self._die_at("close")
        super().close(file)
        del self._files[file]

    def sync_folder(self, path: Path) -> None:
        self._die_at("sync_folder")
        assert path.is_dir()
        for change in self._changes:
            change.durable = change.durable or change.path.parent == path

    def rename(self, source: Path, target: Path) -> None:
        self._die_at("rename")
        replaced = None
        if self.leaves == "synced" and target.is_file():
            assert self.graveyard is not None
            replaced = self.graveyard / f"{len(self._changes)}"
            os.link(target, replaced)
        super().rename(source, target)
        self._changes.append(_Change("rename", target, source, replaced))

    def remove(self, path: Path) -> None:
        dies = self._dies("remove")
        if self.leaves == "synced" and path.exists():
            assert self.graveyard is not None
            kept = self.graveyard / f"{len(self._changes)}"
            path.rename(kept)
            self._changes.append(_Change("remove", path, kept))
        elif dies and path.is_dir():
            half = sorted(file for file in path.rglob("*") if file.is_file())
            manifest = path / "manifest.json"
            if manifest in half:
                half.remove(manifest)
                manifest.rename(path / UNFINISHED)
            half = [file for file in half if file.name != UNFINISHED]
            for file in half[: (len(half) + 1) // 2]:
                file.unlink()
        else:
            super().remove(path)
        if dies:
            raise Killed

    # -- what is left ----------------------------------------------------------------------------

    def crash(self) -> None:
        """Takes away what has not survived; changes of names are undone, the last one first."""
        for file in self._files:
            os.close(file)  # as the end of a process does
        self._files.clear()
        if self.leaves == "all":
            return
        moved: list[tuple[Path, Path]] = []
        for change in reversed(self._changes):
            path = change.path
            for source, target in reversed(moved):
                if path.is_relative_to(source):
                    path = target / path.relative_to(source)
            if change.durable or self.leaves == "names":
                if change.kind == "file" and path.exists():
                    os.truncate(path, change.synced_bytes)
                elif change.kind == "rename":
                    assert change.before is not None
                    # what a save has written since is in the folder that came to that place
                    moved.append((change.before, change.path))
            elif change.kind == "folder":
                shutil.rmtree(path)
            elif change.kind == "file":
                path.unlink()
            else:
                assert change.before is not None
                path.rename(change.before) if change.kind == "rename" else change.before.rename(
                    path
                )
                if change.replaced is not None:
                    change.replaced.rename(path)


class FullDisk(Disk):
    """A disk without room at a chosen call of a kind.

    Args:
        method: the call.
        number: of the first one that fails, from 1.
        error: its errno.

    Attributes:
        seen: how many there have been.
    """

    def __init__(
        self, method: str = "write_at", number: int = 1, error: int = errno.ENOSPC
    ) -> None:
        self.seen = 0
        self._number, self._error = number, error
        setattr(self, method, self._failing(getattr(self, method)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.seen += 1
            if self.seen == self._number:
                raise OSError(self._error, os.strerror(self._error))
            return call(*arguments)

        return counted
