"""Facts of the machine of a result."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

from .report import slug

ROOT = Path(__file__).resolve().parent.parent.parent


UNKNOWN = "unknown"  # commit of a copy without git


def cpu_name() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_slug() -> str:
    """Return a short name of the machine for file names, such as ``amd-epyc-2-cores``."""
    return f"{slug(cpu_name())}-{len(os.sched_getaffinity(0))}-cores"


def driver_version() -> str:
    """Return the version of the GPU's driver, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        reply = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"
    return reply.splitlines()[0].strip()


def commit_of_git() -> str:
    """Return the commit that is checked out, with ``+changes`` if tracked files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("+changes" if changed else "")


def commit() -> str:
    """Return the environment's COMMIT, or the one that is checked out; without git, UNKNOWN."""
    if named := os.environ.get("COMMIT"):
        return named
    if (ROOT / ".git").exists():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return commit_of_git()
    return UNKNOWN


def _cpu_facts() -> dict[str, object]:
    return {
        "device": "cpu",
        "processor": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
    }


def _gpu_facts() -> dict[str, object]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "processor": cpu_name(),
    }


def description(device_type: str) -> dict[str, object]:
    """Commit, time, versions and device, as kept with a result.

    Args:
        device_type: ``cpu``, or ``cuda`` for the first GPU.
    """
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **(_gpu_facts() if device_type == "cuda" else _cpu_facts()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
