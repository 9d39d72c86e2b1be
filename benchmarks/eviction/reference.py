"""Simulations of eviction that looks at the whole table, and at one bucket of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
_STEP_BITS, _RANK_BITS = 20, 23
_STAYS = np.iinfo(np.int64).max


class ExactCache:
    """A table that evicts by looking at all of its ids, in batches as ours does.

    A batch is looked up as a whole: scores of present ids are refreshed, then new ids come in. They
    come in order of their first occurrence, each for the id with the least (score, step, id).
    Ids of the batch itself stay; new ids that find no victim are left out. The choice of victims
    does not depend on the order of evictions, so a batch takes the least ones all at once.

    Args:
        ids: int64 [n], distinct: the ids that can occur, which are named by their places.
        capacity: ids that it may hold.
        score: ``"step"`` (LRU), ``"frequency"`` (LFU; occurrences since the id came in) or
            ``"decayed"`` (the same, each of which counts half after a half-life).
        half_life: of decayed counts, in steps.

    Raises:
        ValueError: more ids than ranks.
    """

    def __init__(
        self,
        ids: Numbers,
        capacity: int,
        *,
        score: Literal["step", "frequency", "decayed"],
        half_life: float = 1.0,
    ) -> None:
        if len(ids) >= 1 << _RANK_BITS:
            raise ValueError(f"ids has {len(ids)} ids, expected fewer than {1 << _RANK_BITS}")
        self._capacity = capacity
        self._by_frequency = score == "frequency"
        self._decayed = np.zeros(len(ids)) if score == "decayed" else None  # logarithms
        self._half_life = half_life
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
        """Look a batch up, then end the step.

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
        brought = self._clock / self._half_life + np.log2(counts)
        if self._decayed is not None:
            self._decayed[found] = np.logaddexp2(self._decayed[found], brought[there])
        new = np.flatnonzero(~there)
        new = new[np.argsort(first[new])]
        room = self._capacity - len(self._members)
        if len(new) > room:
            room += self._evict(len(new) - room)
            new = new[:room]
        self._frequency[distinct[new]] = counts[new]
        self._step[distinct[new]] = self._clock
        if self._decayed is not None:
            self._decayed[distinct[new]] = brought[new]
        self._present[distinct[new]] = True
        self._members = np.concatenate([self._members, distinct[new]])
        self._clock += 1
        return int(counts[there].sum())

    def _evict(self, wanted: int) -> int:
        """Take the ids with the least ranks out; return how many could go."""
        members = self._members
        if self._decayed is not None:
            goes = members[self._step[members] != self._clock]
            keys = (self._rank[goes], self._step[goes], self._decayed[goes])
            going = goes[np.lexsort(keys)[:wanted]]
            self._present[going] = False
            self._members = members[self._present[members]]
            return len(going)
        order = (self._step[members] << _RANK_BITS) | self._rank[members]
        if self._by_frequency:  # counts saturate where the key's bits end: never reached
            limit = (1 << (63 - _STEP_BITS - _RANK_BITS)) - 1
            order |= np.minimum(self._frequency[members], limit) << (_STEP_BITS + _RANK_BITS)
        order[self._step[members] == self._clock] = _STAYS
        count = min(wanted, int((order != _STAYS).sum()))
        if count > 0:
            going = order <= np.partition(order, count - 1)[count - 1]
            self._present[members[going]] = False
            self._members = members[~going]
        return count


@dataclass(frozen=True)
class FillCurve:
    """Course of a table that new ids fill, part by part.

    Attributes:
        used: share of the rows in use after each part, from 0 on.
        evicting: share of the inserts of each part that evict.
        used_at_first: share of the rows in use when the first one evicts.
    """

    used: list[float]
    evicting: list[float]
    used_at_first: float


def one_bucket_curve(
    capacity: int, slots: int, inserts: int, *, parts: int, seed: int
) -> FillCurve:
    """Insert random new ids into a table with one bucket an id, which evicts once it is full.

    Args:
        capacity: rows of the table.
        slots: rows of a bucket.
        inserts: new ids, enough to evict.
        parts: points of the curve.
        seed: of the buckets of the ids.

    Returns:
        The curve.
    """
    count = max(capacity // slots, 1)
    buckets = np.random.default_rng(seed).integers(count, size=inserts)
    by_bucket = np.argsort(buckets, kind="stable")
    begins = np.searchsorted(buckets[by_bucket], np.arange(count))
    earlier = np.arange(inserts) - begins[buckets[by_bucket]]  # inserts into the same bucket
    evicts = np.empty(inserts, dtype=bool)
    evicts[by_bucket] = earlier >= slots
    used, evicting = [0.0], [0.0]
    for part in np.array_split(evicts, parts):
        used.append(used[-1] + int((~part).sum()) / (count * slots))
        evicting.append(float(part.mean()))
    return FillCurve(used, evicting, int(np.argmax(evicts)) / (count * slots))
