"""What eviction would do if it looked at the whole table, and if it looked at one bucket of it."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
_STEP_BITS, _RANK_BITS = 20, 23
_STAYS = np.iinfo(np.int64).max


class ExactCache:
    """A table that evicts by looking at all of its ids, in batches as ours does.

    A batch is looked up as a whole: scores of the ids that are there are refreshed, then new ids
    come in, in order of their first occurrence, each for the id with the least (score, step, id).
    Ids of the batch itself stay; new ids for which there is nobody to go are left out. Which ids go
    does not depend on the order of evictions, so a batch takes the least ones all at once.

    Args:
        ids: int64 [n], distinct: the ids that can occur, who are called by their places.
        capacity: ids that it may hold.
        score: ``"step"`` (LRU) or ``"frequency"`` (LFU; occurrences since the id came in).

    Raises:
        ValueError: more ids than ranks.
    """

    def __init__(
        self, ids: Numbers, capacity: int, *, score: Literal["step", "frequency"]
    ) -> None:
        if len(ids) >= 1 << _RANK_BITS:
            raise ValueError(f"ids has {len(ids)} ids, expected fewer than {1 << _RANK_BITS}")
        self._capacity = capacity
        self._by_frequency = score == "frequency"
        self._rank = np.empty(len(ids), dtype=np.int64)  # of an id among all
        self._rank[np.argsort(ids)] = np.arange(len(ids))
        self._present = np.zeros(len(ids), dtype=bool)
        self._frequency = np.zeros(len(ids), dtype=np.int64)
        self._step = np.zeros(len(ids), dtype=np.int64)
        self._members = np.empty(0, dtype=np.int64)
        self._clock = 0

    def __len__(self) -> int:
        return len(self._members)

    def look_up(self, numbers: Numbers) -> int:
        """Looks a batch up, then ends the step.

        Args:
            numbers: int64 [N], places in ``ids``.

        Returns:
            Occurrences of ids that were there.
        """
        distinct, first, counts = np.unique(numbers, return_index=True, return_counts=True)
        there = self._present[distinct]
        found = distinct[there]
        self._frequency[found] += counts[there]
        self._step[found] = self._clock
        new = np.flatnonzero(~there)
        new = new[np.argsort(first[new])]
        room = self._capacity - len(self._members)
        if len(new) > room:
            room += self._evict(len(new) - room)
            new = new[:room]
        self._frequency[distinct[new]] = counts[new]
        self._step[distinct[new]] = self._clock
        self._present[distinct[new]] = True
        self._members = np.concatenate([self._members, distinct[new]])
        self._clock += 1
        return int(counts[there].sum())

    def _evict(self, wanted: int) -> int:
        """Takes the ids with the least ranks out; returns how many could go."""
        members = self._members
        order = (self._step[members] << _RANK_BITS) | self._rank[members]
        if self._by_frequency:  # counts saturate where the key's bits end: nobody goes there
            limit = (1 << (63 - _STEP_BITS - _RANK_BITS)) - 1
            order |= np.minimum(self._frequency[members], limit) << (_STEP_BITS + _RANK_BITS)
        order[self._step[members] == self._clock] = _STAYS
        count = min(wanted, int((order != _STAYS).sum()))
        if count > 0:
            going = order <= np.partition(order, count - 1)[count - 1]
            self._present[members[going]] = False
            self._members = members[~going]
        return count


def one_bucket_curve(
    capacity: int, slots: int, inserts: int, *, parts: int, seed: int
) -> tuple[list[float], list[float]]:
    """Random new ids into a table where an id has one bucket and evicts once that is full.

    Args:
        capacity: rows of the table.
        slots: rows of a bucket.
        inserts: new ids.
        parts: points of the curve.
        seed: of the buckets of the ids.

    Returns:
        The share of rows used after each part of the inserts, and the share of those inserts that
        evicted.
    """
    buckets = np.random.default_rng(seed).integers(capacity // slots, size=inserts)
    filled = np.zeros(capacity // slots, dtype=np.int64)
    used, evicting = [0.0], [0.0]
    for part in np.array_split(buckets, parts):
        before = int(np.minimum(filled, slots).sum())
        filled += np.bincount(part, minlength=len(filled))
        after = int(np.minimum(filled, slots).sum())
        used.append(after / (len(filled) * slots))
        evicting.append(1 - (after - before) / len(part))
    return used, evicting
