"""The checkpoints with which a delta log in a directory begins, and goes on: its bases.

No base takes the place of another, so that a path always means the same content.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from torch_dynemb.checkpoint.entries import MANIFEST
from torch_dynemb.checkpoint.files.disk import Disk
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint

_DISK = Disk()
_NAME = re.compile(r"base(?:-(\d{20}))?")


def base_folder(log: Path, sequence: int) -> Path:
    """Where a base of a log lies.

    Args:
        log: its directory.
        sequence: number of the commit whose content the base has.
    """
    return log / ("base" if sequence == 0 else f"base-{sequence:020}")


def base_folders(log: Path) -> dict[int, Path]:
    """The bases that are there, by the number of their commit, ascending.

    Args:
        log: directory of the log.
    """
    names = [path.parent.name for path in log.glob(f"base*/{MANIFEST}")]
    found = {name: _NAME.fullmatch(name) for name in names}
    numbers = sorted((int(match[1] or 0), name) for name, match in found.items() if match)
    return {number: log / name for number, name in numbers}


def newest_base(log: Path, known: Collection[str]) -> Path:
    """The newest base that the commits of a log name, or the first one.

    One that they do not name was saved by a process that died before it could say so.

    Args:
        log: its directory.
        known: uuids that the commits name; none: there are no commits.
    """
    folders = base_folders(log)
    for folder in reversed(folders.values()):
        if not known:
            return folder
        with open_checkpoint(folder) as saved:
            if saved.uuid in known:
                return folder
    return base_folder(log, 0)


def remove_bases(log: Path, *, before: int = 0, after: int | None = None) -> None:
    """Removes bases of commits that are dropped or rolled back.

    Args:
        log: directory of the log.
        before: number of the first commit whose base stays.
        after: number of the last one; None: all from there on stay.
    """
    for number, folder in base_folders(log).items():
        if number < before or (after is not None and number > after):
            _DISK.remove(folder)


__all__ = ["base_folder", "base_folders", "newest_base", "remove_bases"]
