"""Sinks of the ranks of a log, at a path or a URL."""

from __future__ import annotations

import re

from torch_dynemb.checkpoint.file_names import rank_folder
from torch_dynemb.delta_log.directory import DirectorySink
from torch_dynemb.delta_log.object_sink import ObjectSink
from torch_dynemb.files.locations import Location, Url
from torch_dynemb.files.presence import names_in

_MOST_RANKS = 1 << 16


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


__all__ = ["rank_folders", "rank_sinks", "sink_of"]
