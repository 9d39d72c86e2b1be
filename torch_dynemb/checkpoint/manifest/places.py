"""Where a checkpoint lies: the folder, and the names it has while one takes the place of another.

A save writes into ``NAME.tmp-UUID``. Where ``NAME`` is a checkpoint already, that one becomes
``NAME.old-UUID`` for the moment between two renames; who dies there leaves the new one, whole,
under its first name.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch_dynemb.argument_checks import described
from torch_dynemb.checkpoint.entries import MANIFEST
from torch_dynemb.checkpoint.files.disk import Disk
from torch_dynemb.checkpoint.manifest.file import read_manifest
from torch_dynemb.process.interrupts import held_back


def checked_path(owner: str, path: object) -> Path:
    """A path that a user has given, without links in it.

    Raises:
        TypeError: it is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{owner}: path is {described(path)}, expected a str or a Path")
    return Path(os.path.realpath(os.fspath(path)))


def unfinished(path: Path, uuid: str) -> Path:
    """Where a checkpoint is while it is written."""
    return path.with_name(f"{path.name}.tmp-{uuid}")


def check_replaceable(path: Path) -> None:
    """Raises FileExistsError where something lies that is no checkpoint."""
    if os.path.lexists(path) and not (path / MANIFEST).is_file():
        raise FileExistsError(
            f"checkpoint.save: {path} is there and no checkpoint, which a save would replace: "
            "choose another path, or remove it"
        )


def locate(path: Path) -> Path:
    """The folder of the last whole checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    for left in left_behind(path):
        if _is_whole(left):
            return left
    raise FileNotFoundError(
        f"{path} is no checkpoint: "
        + (f"it has no {MANIFEST}" if path.exists() else "there is nothing")
    )


def left_behind(path: Path) -> list[Path]:
    """What saves that died have left beside a checkpoint: first what is newer."""
    if not path.parent.is_dir():
        return []
    names = (f"{path.name}.tmp-", f"{path.name}.old-")
    found = [entry for entry in path.parent.iterdir() if entry.name.startswith(names)]
    return sorted(found, key=lambda entry: (entry.name.startswith(names[1]), entry.name))


def _is_whole(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except (OSError, ValueError):
        return False
    return True


def make_parents(disk: Disk, path: Path) -> None:
    """Makes the folders above a checkpoint, and waits until they are on the disk."""
    missing = []
    parent = path.parent
    while not parent.is_dir():
        missing.append(parent)
        parent = parent.parent
    for folder in reversed(missing):
        disk.make_folder(folder)
        disk.sync_folder(folder.parent)


def settle(disk: Disk, path: Path) -> None:
    """Puts a checkpoint that a dead save has left in its place, and removes the rest."""
    left = left_behind(path)
    if left and not path.exists():
        whole = next((entry for entry in left if _is_whole(entry)), None)
        if whole is not None:
            disk.rename(whole, path)
            disk.sync_folder(path.parent)
    for entry in left:
        disk.remove(entry)


def put_in_place(disk: Disk, whole: Path, path: Path, uuid: str) -> None:
    """Gives a checkpoint that is on the disk its name, in place of the one before.

    Raises:
        OSError: the disk fails; the one before has its name.
    """
    old = path.with_name(f"{path.name}.old-{uuid}") if path.exists() else None
    moves = [(whole, path)] if old is None else [(path, old), (whole, path)]
    done: list[tuple[Path, Path]] = []
    with held_back():
        try:
            for source, target in moves:
                disk.rename(source, target)
                done.append((source, target))
            disk.sync_folder(path.parent)
        except OSError:
            for source, target in reversed(done):
                disk.rename(target, source)
            raise
    if old is not None:
        disk.remove(old)


__all__ = [
    "check_replaceable",
    "checked_path",
    "left_behind",
    "locate",
    "make_parents",
    "put_in_place",
    "settle",
    "unfinished",
]
