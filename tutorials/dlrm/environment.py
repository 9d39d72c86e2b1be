"""What a run ran on: the machine, and versions of what it is made of."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import torch

import torch_dynemb as td
from tutorials.dlrm.options import Options


def machine(opts: Options) -> dict[str, str]:
    """Return processor, cores, memory, system, and the GPU if it was used; by what they are."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    facts = {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.1f} GiB",
        "instruction set of torch": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
    }
    if opts.device == "cuda":
        facts["GPU"] = torch.cuda.get_device_name()
    return facts


def versions() -> dict[str, str]:
    """Return versions by name."""
    return {
        "torch_dynemb": td.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
