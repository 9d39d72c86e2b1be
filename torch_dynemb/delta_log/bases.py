"""Bases of a delta log in a directory: the checkpoints with which followers begin.

A base never replaces another, so that a path always means the same content.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from torch_dynemb.checkpoint.file_names import MANIFEST
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location
from torch_dynemb.files.presence import is_file, names_in
from torch_dynemb.files.uploads import disk_of

_DISK = Disk()
_NAME = re.compile(r"base(?:-(\d{20}))?")


def base_folder(log: Location, sequence: int) -> Location:
    """Return the folder of a base.

    Args:
        log: directory of the log.
        sequence: number of the last commit that the base includes.
    """
    return log / ("base" if sequence == 0 else f"base-{sequence:020}")


def base_folders(log: Location) -> dict[int, Location]:
    """Return the existing bases by the number of their commit, ascending.

    Args:
        log: directory of the log.
    """
    folders = _folders(log)
    return {number: base for number, base in folders.items() if is_file(base / MANIFEST)}


def _folders(log: Location) -> dict[int, Location]:
    """Return the folders of bases, also of those that are written or were removed in part."""
    found = (_NAME.fullmatch(name) for name in names_in(log))
    numbers = sorted((int(match[1] or 0), match[0]) for match in found if match)
    return {number: log / name for number, name in numbers}


def newest_base(log: Location, known: Collection[str]) -> Location:
    """Return the newest base that the commits of a log name, or the first one.

    A newer base that no commit names was saved by a process that died too early.

    Args:
        log: directory of the log.
        known: uuids that the commits name; empty for a log without commits.
    """
    folders = base_folders(log)
    for folder in reversed(folders.values()):
        if not known:
            return folder
        with open_checkpoint(str(folder)) as saved:
            if saved.uuid in known:
                return folder
    return base_folder(log, 0)


def remove_bases(log: Location, *, before: int = 0, after: int | None = None) -> None:
    """Remove bases of commits that are dropped or rolled back.

    Args:
        log: directory of the log.
        before: number of the first commit with a base that stays.
        after: number of the last one; None: all later ones stay.
    """
    for number, folder in _folders(log).items():
        if number < before or (after is not None and number > after):
            disk_of(folder, _DISK).remove(folder)


__all__ = ["base_folder", "base_folders", "newest_base", "remove_bases"]
