"""A program that is killed while it saves: each line of its input starts a process that saves.

The process saves contents 1, 2, 3 ... to the path that the line names, and prints its id first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import torch_dynemb as td

IDS = 300


def filled(number: int) -> td.DynamicEmbedding:
    """Make a table with content that depends on a number."""
    module = td.DynamicEmbedding(8, optimizer=td.SGD(lr=0.1), max_rows=IDS, name="table")
    module.group.insert_or_assign(
        0, torch.arange(number % 7, IDS), torch.full((IDS - number % 7, 8), float(number))
    )
    return module


def _save_for_ever(path: Path) -> None:
    number = 0
    while True:
        number += 1
        td.checkpoint.save(path, filled(number), state={"number": number})


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads before the forks, which would not be in the children
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _save_for_ever(Path(line.strip()))
        print(child, flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)
