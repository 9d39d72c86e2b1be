"""A file of records that another program appends to, and a reader with a position in it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

ENDED = "ended"  # beside a file that does not grow any more


def read(path: Path, columns: int, begin: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Read records, int64 [n, columns], as far as they are there.

    Args:
        path: the file.
        columns: numbers of a record.
        begin: number of the first record.
        count: number of records.
    """
    numbers = np.fromfile(path, np.int64, count * columns, offset=begin * 8 * columns)
    whole = len(numbers) // columns * columns  # the last one may be written in part
    return numbers[:whole].reshape(-1, columns)


def count_of(path: Path, columns: int) -> int:
    """Return the number of whole records."""
    return os.path.getsize(path) // (8 * columns)


class Tail(IterableDataset[Tensor]):
    """Batches of a file that grows, with a position for ``StatefulDataLoader``.

    Args:
        path: the file. It ends if ``ended`` lies beside it.
        columns: numbers of a record.
        batch: records of a batch, at most.
    """

    def __init__(self, path: Path, columns: int, batch: int) -> None:
        self._path, self._columns, self._batch, self._position = path, columns, batch, 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            ended = self._path.with_name(ENDED).exists()
            there = count_of(self._path, self._columns)
            count = min(self._batch, there - self._position)
            if count > 0:
                records = read(self._path, self._columns, self._position, count)
                self._position += count
                yield torch.from_numpy(records)
            elif ended:
                return
            else:
                time.sleep(0.001)

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]
