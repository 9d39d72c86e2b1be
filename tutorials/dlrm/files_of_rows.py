"""Rows that lie in files (``--storage ssd``): where, and what the job says about them."""

from __future__ import annotations

from typing import Any

import torch_dynemb as td
from torch_dynemb.storage.tiers import StorageStats
from tutorials.dlrm.loop import Pass
from tutorials.dlrm.options import Options


def storage_of(opts: Options) -> td.SSDStore | None:
    """Return where the rows of the job lie; None: in memory."""
    if opts.storage == "memory":
        return None
    assert opts.storage_path is not None
    assert opts.cache is not None
    return td.SSDStore(opts.storage_path, cache=opts.cache, disk=opts.disk)


def shown(stats: StorageStats, progress: Pass) -> dict[str, str]:
    """Return what the progress bar shows."""
    read, written = _mb_per_s(stats, progress)
    return {
        "hits": f"{stats.hits / max(1, stats.hits + stats.misses):.1%}",
        "misses": f"{stats.misses:,}",
        "read": f"{read:.1f}MB/s",
        "written": f"{written:.1f}MB/s",
    }


def summary(opts: Options, stats: StorageStats, progress: Pass) -> dict[str, Any]:
    """Return what the job prints at its end; see ``--help``."""
    read, written = _mb_per_s(stats, progress)
    return {
        "kind": opts.storage,
        "cache": opts.cache,
        "hits": stats.hits,
        "misses": stats.misses,
        "prefetched": stats.prefetched,
        "read_mb_per_s": round(read, 2),
        "written_mb_per_s": round(written, 2),
        "waited_s": round(stats.waited, 3),
        "stored": stats.stored,
        "disk_bytes": stats.disk_bytes,
        "peak_bytes": progress.peak_bytes,
    }


def _mb_per_s(stats: StorageStats, progress: Pass) -> tuple[float, float]:
    """What this process has read and written in a second of training."""
    seconds = max(progress.seconds - progress.seconds_before, 1e-9)
    return stats.bytes_read / seconds / 1e6, stats.bytes_written / seconds / 1e6
