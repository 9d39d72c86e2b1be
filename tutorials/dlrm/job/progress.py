"""Facts that the progress bar shows beside loss and AUC."""

from __future__ import annotations

import resource
from pathlib import Path

from tutorials.dlrm.data import Position
from tutorials.dlrm.model import Figures


def shown(figures: Figures, position: Position, seconds: float) -> dict[str, str]:
    """Return facts of the tables, their files, the process and the reader by name.

    Args:
        figures: Of the tables.
        position: Of the reader.
        seconds: Of training, in which files have been read and written.
    """
    facts = {
        "ids": f"{figures.ids:,}",
        "tables": f"{figures.table_bytes / 2**20:.0f}MiB",
        "peak": f"{peak_memory() / 2**20:.0f}MiB",
    }
    if (files := figures.storage) is not None:
        facts["hits"] = f"{files.hits / max(1, files.hits + files.misses):.1%}"
        facts["misses"] = f"{files.misses:,}"
        facts["read"] = f"{files.bytes_read / seconds / 1e6:.1f}MB/s"
        facts["written"] = f"{files.bytes_written / seconds / 1e6:.1f}MB/s"
    counts = {name: getattr(figures, name) for name in ("evicted", "rejected", "not_admitted")}
    counts["skipped"] = position.skipped
    return facts | {name: f"{count:,}" for name, count in counts.items() if count > 0}


def peak_memory() -> int:
    """Return the most bytes this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def resident_memory() -> int:
    """Return the bytes this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
