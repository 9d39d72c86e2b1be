"""A file of events, which a program appends to at a rate: an id and the time of each."""

from __future__ import annotations

import argparse
import select
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tutorials.online import growing_file
from tutorials.online.growing_file import ENDED

COLUMNS = 2  # int64 id, int64 nanoseconds
EVENT_BYTES = 8 * COLUMNS
BATCH = 1024


def ids_of(count: int, known: int, draw: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw ids, int64 [count]: few of them often, many seldom."""
    return (known * draw.random(count) ** 4).astype(np.int64)


def read(path: Path, begin: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Read events, int64 [n, 2]: ids and times."""
    return growing_file.read(path, COLUMNS, begin, count)


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
