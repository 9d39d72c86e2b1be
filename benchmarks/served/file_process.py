"""A process that opens a pickled model and looks up: ``first PATH``, or
``limited PATH CGROUP BYTES CALLS``. It prints what it measured as JSON."""

from __future__ import annotations

import json
import pickle
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from common.id_streams import ZipfNumbers
from tiered.memory_limit import limited_memory

import torch_dynemb  # noqa: F401 - before the clock starts

IDS = 2560


def first(path: str) -> dict[str, float]:
    """Return the seconds until the first answer."""
    begin = time.perf_counter()
    with open(path, "rb") as file:
        model, ids = pickle.load(file)
    model(ids)
    return {"first_s": time.perf_counter() - begin}


def limited(path: str, cgroup: str, size: str, calls: str) -> dict[str, float]:
    """Return memory and milliseconds of lookups within a limit."""
    with open(path, "rb") as file:
        model, ids = pickle.load(file)
    numbers = ZipfNumbers(len(ids), seed=2, exponent=1.05)
    with limited_memory(Path(cgroup)) as limit:
        before = limit.anonymous_bytes()
        limit.set(before + int(size))
        times = []
        for call in range(3 * int(calls)):
            asked = ids[numbers.draw(IDS)]
            begin = time.perf_counter()
            model(asked)
            if call >= int(calls):
                times.append(1e3 * (time.perf_counter() - begin))
        used = limit.anonymous_bytes() - before + model.frozen_tables.stats().index_bytes
    p99 = statistics.quantiles(times, n=100, method="inclusive")[98]
    return {
        "p50": statistics.median(times),
        "p99": p99,
        "requests": 1e3 * len(times) / sum(times),
        "bytes": used,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"first": first, "limited": limited}[sys.argv[1]](*sys.argv[2:])))
