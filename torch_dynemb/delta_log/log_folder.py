"""Folder of a log, at a path or a URL: sinks of its ranks, and bases."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from torch_dynemb.changes.batch import rank_folder
from torch_dynemb.checkpoint.file_names import MANIFEST
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.delta_log.directory import DirectorySink
from torch_dynemb.delta_log.object_sink import ObjectSink
from torch_dynemb.files.commit import drafts_in, remove_dead_drafts
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location, Url
from torch_dynemb.files.presence import is_file, names_in
from torch_dynemb.files.uploads import disk_of

_MOST_RANKS = 1 << 16
_DISK = Disk()
_NAME = re.compile(r"base(?:-(\d{20}))?")


def sink_of(folder: Location) -> DirectorySink | ObjectSink:
    """Return the sink of a rank.

    Args:
        folder: folder of the rank in the log.
    """
    return ObjectSink(folder) if isinstance(folder, Url) else DirectorySink(folder)


def rank_folders(log: Location) -> list[Location]:
    """List the folders of all ranks, by rank; empty if nothing is written yet.

    Args:
        log: place of the log.

    Raises:
        ValueError: it has logs of different numbers of ranks.
    """
    found = [re.fullmatch(r"r(\d+)-of-(\d+)", name) for name in names_in(log)]
    counts = {int(match[2]) for match in found if match}
    if max(counts, default=0) > _MOST_RANKS:
        raise ValueError(
            f"DeltaLog: {log} has a folder of a log of {max(counts)} ranks, expected at most "
            f"{_MOST_RANKS}: remove it"
        )
    if len(counts) > 1:
        raise ValueError(
            f"DeltaLog: {log} has logs of {sorted(counts)} ranks: publish to a new directory when "
            "the number of ranks changes"
        )
    return [log / rank_folder(rank, count) for count in counts for rank in range(count)]


def rank_sinks(log: Location) -> list[DirectorySink | ObjectSink]:
    """Return the sinks of all ranks, by rank; empty if one of them is missing.

    Args:
        log: place of the log.

    Raises:
        ValueError: it has logs of different numbers of ranks.
    """
    folders, there = rank_folders(log), names_in(log)
    return [sink_of(of) for of in folders] if all(of.name in there for of in folders) else []


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
    """Remove bases of commits that are dropped or rolled back, and drafts that dead processes left.

    Args:
        log: directory of the log.
        before: number of the first commit with a base that stays.
        after: number of the last one; None: all later ones stay.
    """
    for number, folder in _folders(log).items():
        if number < before or (after is not None and number > after):
            disk_of(folder, _DISK).remove(folder)
    if isinstance(log, Path):
        remove_dead_drafts(_DISK, drafts_in(log, _NAME.pattern))


__all__ = [
    "base_folder",
    "base_folders",
    "newest_base",
    "rank_folders",
    "rank_sinks",
    "remove_bases",
    "sink_of",
]
