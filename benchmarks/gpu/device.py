"""What a result on a GPU was measured on; prints it as JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess

import torch

from benchmarks import machine


def driver_version() -> str:
    """The GPU driver's, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        reply = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"
    return reply.splitlines()[0].strip()


def commit() -> str:
    """The commit that is checked out; in a copy without git, that of the environment's COMMIT."""
    if given := os.environ.get("COMMIT"):
        return given
    try:
        return machine.commit()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def description() -> dict[str, object]:
    """Commit, time, versions and devices, as kept with a result."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "processor": machine.cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def slug(name: str) -> str:
    """A device's name for file names, such as ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    print(json.dumps(description()))
