"""A file of events, which a program appends to at a rate: an id and the time of each."""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

EVENT_BYTES = 16  # int64 id, int64 nanoseconds
BATCH = 1024
ENDED = "ended"  # beside a file that does not grow any more


def ids_of(count: int, known: int, draw: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw ids, int64 [count]: few of them often, many seldom."""
    return (known * draw.random(count) ** 4).astype(np.int64)


def read(path: Path, begin: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Read events, int64 [n, 2]: ids and times."""
    numbers = np.fromfile(path, np.int64, count * 2, offset=begin * EVENT_BYTES)
    return numbers.reshape(-1, 2)


class Tail(IterableDataset[Tensor]):
    """Batches of ids from a file that grows, with a position for ``StatefulDataLoader``.

    Args:
        path: the file. It ends if ``ended`` lies beside it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            ended = self._path.with_name(ENDED).exists()
            there = os.path.getsize(self._path) // EVENT_BYTES
            count = min(BATCH, there - self._position)
            if count > 0:
                ids = read(self._path, self._position, count)[:, 0]
                self._position += count
                yield torch.from_numpy(np.ascontiguousarray(ids))
            elif ended:
                return
            else:
                time.sleep(0.001)

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


def write_whole(path: Path, count: int, known: int) -> None:
    """Write a file that does not grow."""
    events = np.zeros((count, 2), np.int64)
    events[:, 0] = ids_of(count, known, np.random.default_rng(1))
    events.tofile(path)
    path.with_name(ENDED).touch()


def main() -> None:
    """Write events at a rate until the input ends."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("path", type=Path)
    arguments.add_argument("--rate", type=float, required=True, help="of a second")
    arguments.add_argument("--known", type=int, required=True, help="distinct ids")
    options = arguments.parse_args()
    draw, written, began = np.random.default_rng(1), 0, time.monotonic()
    with options.path.open("ab", buffering=0) as file:
        while not select.select([sys.stdin], [], [], 0.005)[0]:
            due = int((time.monotonic() - began) * options.rate)
            events = np.empty((due - written, 2), np.int64)
            events[:, 0] = ids_of(due - written, options.known, draw)
            events[:, 1] = time.time_ns()
            file.write(events.tobytes())
            written = due
    options.path.with_name(ENDED).touch()


if __name__ == "__main__":
    main()
