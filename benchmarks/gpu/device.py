"""What a result on a GPU was measured on; prints it as JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import machine

ROOT = Path(__file__).resolve().parent.parent.parent


def driver_version() -> str:
    """The GPU driver's, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        reply = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"
    return reply.splitlines()[0].strip()


class CommitUnknownError(Exception):
    """A result that names no commit says nothing."""


def commit() -> str:
    """The commit that is checked out; in a copy without git, that of the environment's COMMIT.

    Raises:
        CommitUnknownError: neither says it.
    """
    reason = "there is no .git"
    if (ROOT / ".git").exists():
        try:
            return machine.commit()
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"git does not say it ({error})"
    if given := os.environ.get("COMMIT"):
        return given
    raise CommitUnknownError(
        f"the commit is unknown: {reason} in {ROOT}. Set the environment variable COMMIT to the "
        "output of `git rev-parse HEAD`"
    )


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


def main() -> None:
    if torch.version.cuda is None:
        sys.exit(f"torch {torch.__version__} has no CUDA")
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no GPU")
    try:
        print(json.dumps(description()))
    except CommitUnknownError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
