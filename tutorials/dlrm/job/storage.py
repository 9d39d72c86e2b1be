"""Rows that lie in files (--storage ssd)."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch_dynemb as td
from torch_dynemb.storage.tiers import StorageStats
from tutorials.dlrm.loop import Pass


def storage_of(opts: Namespace) -> td.SSDStore | None:
    """Return the files of the rows; None: all rows are in memory."""
    if opts.storage == "memory":
        return None
    return td.SSDStore(opts.storage_path, cache=opts.cache, disk=opts.disk)


def storage_summary(
    opts: Namespace, stats: StorageStats | None, progress: Pass
) -> dict[str, Any] | None:
    """Return what the program prints at its end; see ``--help``."""
    if stats is None:
        return None
    seconds = progress.seconds_of_run()
    return {
        "kind": opts.storage,
        "cache": opts.cache,
        "hits": stats.hits,
        "misses": stats.misses,
        "prefetched": stats.prefetched,
        "read_mb_per_s": round(stats.bytes_read / seconds / 1e6, 2),
        "written_mb_per_s": round(stats.bytes_written / seconds / 1e6, 2),
        "waited_s": round(stats.waited, 3),
        "stored": stats.stored,
        "disk_bytes": stats.disk_bytes,
        "peak_bytes": progress.peak_bytes,
    }
