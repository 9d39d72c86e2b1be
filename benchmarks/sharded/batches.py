"""Ids of batches on each rank: Zipf draws, and new ids among them."""

from __future__ import annotations

import torch
from common.id_streams import ZipfNumbers, distinct_ids
from sharded.collections import WORLD_SIZE, Sizes
from torch import Tensor

BATCHES = 4  # different batches, used in turn


def numbers_of(sizes: Sizes, bag: int, rank: int) -> list[Tensor]:
    """Return Zipf numbers of batches, int64 [tables * batch * bag] each."""
    count = sizes.batch * bag
    batches = torch.empty(BATCHES, sizes.tables, count, dtype=torch.int64)
    for table in range(sizes.tables):
        stream = ZipfNumbers(sizes.rows, seed=table)
        for batch in range(BATCHES):
            batches[batch, table] = stream.draw(WORLD_SIZE * count)[rank::WORLD_SIZE]
    return list(batches.flatten(1))


class NewIds:
    """Batches in which some ids were never seen before, and other draws elsewhere.

    Args:
        first: the smallest number that has not been seen.
    """

    def __init__(self, first: int, share: float, rank: int) -> None:
        self._next = first + rank
        self._share = share
        self._generator = torch.Generator().manual_seed(rank)

    def of(self, ids: Tensor) -> Tensor:
        """Return ``ids`` with new ones at random places."""
        count = max(1, int(self._share * len(ids)))
        places = torch.randperm(len(ids), generator=self._generator)[:count]
        changed = ids.clone()
        changed[places] = distinct_ids(self._next, WORLD_SIZE * count)[::WORLD_SIZE]
        self._next += WORLD_SIZE * count
        return changed
