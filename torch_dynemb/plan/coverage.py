"""Which part of the lookups the most frequent ids receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.distributed.owners import part_of
from torch_dynemb.plan.counting import IdCounts


class Coverage:
    """Lookups by rank of frequency, of the ids of several columns together.

    It is what a table would serve that knew the most frequent ids in advance. One that evicts the
    least frequent ids serves about as much once it has seen them; one that evicts those not seen
    for longest serves less where ids come in random order, and more where they come in bursts.

    Args:
        columns: counts of the ids of each.
    """

    def __init__(self, columns: Sequence[IdCounts]) -> None:
        counts = torch.cat([column.counts for column in columns]).double()
        weights = torch.cat([column.weights for column in columns])
        served = torch.cat([_served(column) for column in columns])
        later = torch.cat([_served(column) * _kept_share(column) for column in columns])
        column = torch.cat(
            [torch.full_like(of.counts, number) for number, of in enumerate(columns)]
        )
        order = counts.argsort(descending=True, stable=True)
        self._column = column[order]
        self._weights = weights[order]
        self._ids = weights[order].cumsum(0)
        self._lookups = served[order].cumsum(0)
        self._later = later[order].cumsum(0)
        self._later_repeated = later[counts > 1].sum()
        self._columns = len(columns)

    @property
    def later_share_of_repeated(self) -> float:
        """The part of later lookups that go to ids which the sample has more than once."""
        return float(self._later_repeated / self._lookups[-1]) if self._ids.numel() else 1.0

    def later_share(self, capacity: float, all_ids: float) -> float:
        """Return the part of later lookups that go to the ``capacity`` most frequent ids, at least.

        An id that the sample has c times is expected c - d times in as many later lookups: absolute
        discounting (Ney, Essen, Kneser 1994), with the d by which the ids of the sample receive
        together what Good (1953) gives them, all but the part of those seen once. Beyond the ids of
        the sample it is interpolated to all ids, which receive all lookups; the truth lies above,
        because frequent ids come first.

        Args:
            capacity: ids that have a row.
            all_ids: that there will be.
        """
        if capacity >= all_ids or not self._ids.numel():
            return 1.0
        known = float(self._later[-1] / self._lookups[-1])
        if capacity >= self.ids:
            return known + (1 - known) * (capacity - self.ids) / (all_ids - self.ids)
        place = int(torch.searchsorted(self._ids, float(capacity), right=True))
        if place == 0:
            return float(self._later[0] * capacity / self._ids[0] / self._lookups[-1])
        return float(self._later[place - 1] / self._lookups[-1])

    @property
    def ids(self) -> float:
        """All distinct ids."""
        return float(self._ids[-1]) if self._ids.numel() else 0.0

    def share(self, capacity: float) -> float:
        """Return the part of all lookups that go to the ``capacity`` most frequent ids."""
        if not self._ids.numel():
            return 0.0
        place = int(torch.searchsorted(self._ids, float(capacity), right=True))
        if place == 0:
            return float(self._lookups[0] * capacity / self._ids[0] / self._lookups[-1])
        return float(self._lookups[place - 1] / self._lookups[-1])

    def capacity(self, share: float) -> float:
        """Return the least number of ids that receive such a part of all lookups."""
        if not self._ids.numel():
            return 0.0
        wanted = share * float(self._lookups[-1])
        place = int(torch.searchsorted(self._lookups, wanted * (1 - 1e-12)))
        return float(self._ids[min(place, self._ids.numel() - 1)])

    def divided(self, capacity: float) -> list[float]:
        """Return how many of the ``capacity`` most frequent ids are of each column."""
        among = self._ids <= capacity
        sums = torch.zeros(self._columns, dtype=torch.float64)
        sums.index_add_(0, self._column[among], self._weights[among])
        result: list[float] = sums.tolist()
        return result


class RankLoad(NamedTuple):
    """How evenly lookups go to ranks that share the ids of every table.

    Attributes:
        even: the part of the lookups that each would have if all had the same.
        busiest: the largest part that one of them has.
    """

    even: float
    busiest: float


def rank_load(columns: Sequence[IdCounts], ranks: int) -> RankLoad:
    """Return what goes to the busiest of the ranks, where ids are dealt out by their hash.

    Args:
        columns: counts of the ids of each.
        ranks: at least 1.
    """
    load = torch.zeros(ranks, dtype=torch.float64)
    for column in columns:
        load.index_add_(0, part_of(column.ids.contiguous(), ranks), _served(column))
    total = float(load.sum())
    return RankLoad(1 / ranks, float(load.max()) / total if total else 1 / ranks)


def _kept_share(counts: IdCounts) -> Tensor:
    """Return what is left of an id's count after discounting, as a part of it."""
    discount = counts.seen(1) / counts.distinct if counts.distinct else 0.0
    return 1 - discount / counts.counts


def _served(counts: IdCounts) -> Tensor:
    """Return lookups for which each id stands; together as many as there were."""
    certain = counts.weights == 1
    if bool(certain.all()):
        return counts.counts.double()
    exact = float(counts.counts[certain].sum())
    others = (counts.counts * counts.weights)[~certain]
    served = counts.counts.double()
    served[~certain] = others * ((counts.lookups - exact) / float(others.sum()))
    return served


__all__ = ["Coverage", "RankLoad", "rank_load"]
