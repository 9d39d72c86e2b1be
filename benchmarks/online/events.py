"""A file of events, which a program appends to at a rate: an id and the time of each."""

from __future__ import annotations

import argparse
import os
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


def ids_of(count: int, known: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw ids: few of them often, many seldom."""
    drawn = np.random.default_rng(seed).random(count)
    return (known * drawn**4).astype(np.int64)


def read(path: Path, begin: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Read events, int64 [n, 2]: ids and times."""
    numbers = np.fromfile(path, np.int64, count * 2, offset=begin * EVENT_BYTES)
    return numbers.reshape(-1, 2)


class Tail(IterableDataset[Tensor]):
    """Batches of ids from a file that grows, with a position for ``StatefulDataLoader``.

    Args:
        path: the file.
        total: number of events after which it ends.
    """

    def __init__(self, path: Path, total: int) -> None:
        self._path, self._total, self._position = path, total, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self._position < self._total:
            there = os.path.getsize(self._path) // EVENT_BYTES
            count = min(BATCH, there - self._position)
            if count == 0:
                time.sleep(0.001)
                continue
            ids = read(self._path, self._position, count)[:, 0]
            self._position += count
            yield torch.from_numpy(np.ascontiguousarray(ids))

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


def main() -> None:
    """Write events at a rate."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("path", type=Path)
    arguments.add_argument("--total", type=int, required=True)
    arguments.add_argument("--rate", type=float, required=True, help="of a second")
    arguments.add_argument("--known", type=int, required=True, help="distinct ids")
    options = arguments.parse_args()
    ids = ids_of(options.total, options.known, seed=1)
    written, began = 0, time.monotonic()
    with options.path.open("ab", buffering=0) as file:
        while written < options.total:
            due = min(options.total, int((time.monotonic() - began) * options.rate))
            events = np.empty((due - written, 2), np.int64)
            events[:, 0], events[:, 1] = ids[written:due], time.time_ns()
            file.write(events.tobytes())
            written = due
            time.sleep(0.005)


if __name__ == "__main__":
    main()
