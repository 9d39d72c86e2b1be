"""What a result was measured on."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

import torch


def cpu_name() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def slug() -> str:
    """A short name of the machine for file names, such as ``amd-epyc-2-cores``."""
    name = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    return f"{name}-{len(os.sched_getaffinity(0))}-cores"


def commit() -> str:
    """The commit that is checked out, with ``+changes`` where tracked files differ from it."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("+changes" if changed else "")


def description() -> dict[str, object]:
    """Commit, time, versions and processor, as kept with a result."""
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": "cpu",
        "processor": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
