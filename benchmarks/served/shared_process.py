"""A process that serves a package: ``PACKAGE DIRECTORY`` (``-``: tables of its own).

It answers lines of its input with lines of JSON: ``first``, ``touch`` (looks all rows up), and
``calls BAGS LENGTH COUNT``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from torch_dynemb import serving


def served_model(package: str, directory: str) -> serving.ServedModel:
    """Load the package."""
    return serving.load(package, shared_memory=None if directory == "-" else directory)


def request(bags: int, length: int, ids: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and offsets of bags."""
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, ids, (bags * length,), generator=random)
    return drawn, torch.arange(0, bags * length, length)


def main() -> None:
    torch.set_num_threads(1)
    _, package, directory = sys.argv
    begin = time.perf_counter()
    served = served_model(package, directory)
    (table,) = served.tables.values()
    served.run(*request(1, 1, table.ids))
    said: object = {"first_ms": 1e3 * (time.perf_counter() - begin)}
    for line in sys.stdin:
        words = line.split()
        if words[0] == "touch":
            for ids in torch.arange(table.ids).split(1 << 16):
                served.run(ids, torch.arange(0, len(ids), 16))
        elif words[0] == "calls":
            bags, length, count = map(int, words[1:])
            taken = []
            for seed in range(count):
                asked = request(bags, length, table.ids, seed)
                begin = time.perf_counter()
                served.run(*asked)
                taken.append(1e3 * (time.perf_counter() - begin))
            said = {"p50_ms": statistics.median(taken)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
