"""Share of lookups that the most frequent ids receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.distributed.owners import part_of
from torch_dynemb.plan.counting import IdCounts


class Coverage:
    """Lookups by rank of frequency, of the ids of several columns together.

    This is the share that a table serves if it knows the most frequent ids in advance. A table that
    evicts the least frequent ids serves about as much once it has seen them. A table that evicts
    the least recent ids serves less if ids come in random order, and more if they come in bursts.

    Args:
        columns: counts of the ids of each.
    """

    def __init__(self, columns: Sequence[IdCounts]) -> None:
        counts = torch.cat([column.counts for column in columns]).double()
        weights = torch.cat([column.weights for column in columns])
        served = torch.cat([_served(column) for column in columns])
        later = torch.cat([_served(column) * _kept_share(column) for column in columns])
        column = torch.cat(
            [torch.full_like(column.counts, number) for number, column in enumerate(columns)]
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
        """Share of later lookups of ids that occur more than once in the sample."""
        return float(self._later_repeated / self._lookups[-1]) if self._ids.numel() else 1.0

    def later_share(self, capacity: float, all_ids: float) -> float:
        """Return a lower estimate of the ``capacity`` most frequent ids' share of later lookups.

        An id with c occurrences in the sample is expected c - d times in as many later lookups:
        absolute discounting (Ney, Essen, Kneser 1994). The discount d gives the ids of the sample
        the share of Good (1953): all lookups except the share of ids that occur once. Beyond the
        ids of the sample, the share is interpolated to all ids, which receive all lookups. The
        true value lies above, because frequent ids come first.

        Args:
            capacity: number of ids with a row.
            all_ids: expected number of ids.
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
        """Number of distinct ids."""
        return float(self._ids[-1]) if self._ids.numel() else 0.0

    def share(self, capacity: float) -> float:
        """Return the ``capacity`` most frequent ids' share of all lookups."""
        if not self._ids.numel():
            return 0.0
        place = int(torch.searchsorted(self._ids, float(capacity), right=True))
        if place == 0:
            return float(self._lookups[0] * capacity / self._ids[0] / self._lookups[-1])
        return float(self._lookups[place - 1] / self._lookups[-1])

    def capacity(self, share: float) -> float:
        """Return the smallest number of ids that receive this share of all lookups."""
        if not self._ids.numel():
            return 0.0
        wanted = share * float(self._lookups[-1])
        place = int(torch.searchsorted(self._lookups, wanted * (1 - 1e-12)))
        return float(self._ids[min(place, self._ids.numel() - 1)])

    def divided(self, capacity: float) -> list[float]:
        """Divide the ``capacity`` most frequent ids by column; return numbers of ids."""
        among = self._ids <= capacity
        sums = torch.zeros(self._columns, dtype=torch.float64, device="cpu")
        sums.index_add_(0, self._column[among], self._weights[among])
        result: list[float] = sums.tolist()
        return result


class RankLoad(NamedTuple):
    """Balance of lookups among ranks that share the ids of every table.

    Attributes:
        even: share of each rank if all have the same.
        busiest: largest share of a rank.
    """

    even: float
    busiest: float


def rank_load(columns: Sequence[IdCounts], ranks: int) -> RankLoad:
    """Return the load of ranks if ids are distributed by their hash.

    Args:
        columns: counts of the ids of each.
        ranks: at least 1.
    """
    load = torch.zeros(ranks, dtype=torch.float64, device="cpu")
    for column in columns:
        load.index_add_(0, part_of(column.ids.contiguous(), ranks), _served(column))
    total = float(load.sum())
    return RankLoad(1 / ranks, float(load.max()) / total if total else 1 / ranks)


def _kept_share(counts: IdCounts) -> Tensor:
    """Return the share of each id's count that is left after discounting."""
    discount = counts.seen(1) / counts.distinct if counts.distinct else 0.0
    return 1 - discount / counts.counts


def _served(counts: IdCounts) -> Tensor:
    """Return the lookups that each id represents; their sum is the number of all lookups."""
    certain = counts.weights == 1
    if bool(certain.all()):
        return counts.counts.double()
    exact = float(counts.counts[certain].sum())
    others = (counts.counts * counts.weights)[~certain]
    served = counts.counts.double()
    served[~certain] = others * ((counts.lookups - exact) / float(others.sum()))
    return served


__all__ = ["Coverage", "RankLoad", "rank_load"]
