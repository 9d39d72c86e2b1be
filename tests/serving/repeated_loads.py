"""A process that loads a package again and again, and prints how much memory that has taken."""

from __future__ import annotations

import sys

import psutil
import torch
from packaged import features

import torch_dynemb as td

WARM_UP = 5  # loads, in which allocators and the linker take what they keep


def main(path: str, loads: int) -> None:
    torch.set_num_threads(1)
    process = psutil.Process()
    inputs = features(4, 20)
    before = 0
    for load in range(WARM_UP + loads):
        if load == WARM_UP:
            before = process.memory_info().rss
        served = td.serving.load(path)
        served.run(*inputs)
        if load % 2:  # the others are forgotten
            served.close()
        del served
    print(process.memory_info().rss - before)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
