"""Ids of a step, column by column, from the counts of a sample."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_dynemb.distributed.owners import part_of
from torch_dynemb.plan.counting import IdCounts
from torch_dynemb.plan.growth import distinct_ids

_HOT = 16  # occurrences in the sample from which an id's own share and owner are used


@dataclass(frozen=True)
class ColumnDemand:
    """Ids of a column in the lines of a step.

    Attributes:
        counts: of the ids in the sample.
        total: ids of its table.
        hot: int64 [n], frequent ids.
        hot_shares: float64 [n], their shares of the lookups.
        collision: sum of the squared shares of all other ids.
        ids_by_count: float64 [n] each, numbers of occurrences, and of the ids that have them.
    """

    counts: IdCounts
    total: float
    hot: Tensor
    hot_shares: Tensor
    collision: float
    ids_by_count: tuple[Tensor, Tensor]
    _distinct: dict[float, float] = field(default_factory=dict, repr=False)  # by lines

    @property
    def ids_per_line(self) -> float:
        """Ids of the column in a line."""
        return self.counts.lookups / self.counts.lines

    def distinct(self, lines: float) -> float:
        """Return the expected number of distinct ids in lines drawn in random order.

        Up to the size of the sample this is rarefaction (Hurlbert 1971), beyond it
        :func:`torch_dynemb.plan.growth.distinct_ids`.

        Args:
            lines: at least 0.
        """
        if lines not in self._distinct:
            share = lines / self.counts.lines
            if share > 1:
                self._distinct[lines] = distinct_ids(self.counts, share).expected
            else:
                occurrences, ids = self.ids_by_count
                self._distinct[lines] = float((ids * (1 - (1 - share) ** occurrences)).sum())
        return self._distinct[lines]

    def loads(self, parts: int, lines: int, senders: int | None) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the ids that each part of the table gets in a step.

        Frequent ids are where the hash of the library has them. All others are divided evenly,
        with the variance of their occurrences and of their places; the latter comes from Simpson's
        (1949) unbiased estimate of the sum of squared shares.

        Args:
            parts: ranks that share the ids.
            lines: of the step, over all ranks.
            senders: ranks that send each of their distinct ids once; None: ids are sent as often as
                they occur.

        Returns:
            means: float64 [parts].
            variances: float64 [parts].
        """
        hot, others, squares = self._sent(lines, senders)
        means = torch.full((parts,), others / parts, dtype=torch.float64, device="cpu")
        if parts == 1:
            means += hot.sum()
            return means, torch.zeros_like(means)
        means.index_add_(0, part_of(self.hot, parts), hot)
        chance = means * (1 - means / means.sum().clamp(min=1e-300))
        return means, chance + squares * (parts - 1) / parts**2

    def _sent(self, lines: int, senders: int | None) -> tuple[Tensor, float, float]:
        """Return occurrences of each frequent id, of all others, and the sum of their squares."""
        lookups = lines * self.ids_per_line
        if senders is None:
            hot = self.hot_shares * lookups
            return hot, lookups - float(hot.sum()), lookups**2 * self.collision
        share = lines / senders
        hot = -senders * torch.expm1(-self.hot_shares * share * self.ids_per_line)
        others = max(0.0, senders * self.distinct(share) - float(hot.sum()))
        return hot, others, min(lookups**2 * self.collision, others * senders)


def column_demand(counts: IdCounts, total: float) -> ColumnDemand:
    """Return the demand of a column.

    Args:
        counts: of its ids in the sample.
        total: ids of its table.
    """
    is_hot = (counts.counts >= _HOT) & (counts.weights == 1)
    others = counts.counts[~is_hot].double()
    pairs = max(counts.lookups * (counts.lookups - 1), 1)
    collision = float((counts.weights[~is_hot] * others * (others - 1)).sum()) / pairs
    hot = counts.ids[is_hot].contiguous()
    shares = counts.counts[is_hot].double() / max(counts.lookups, 1)
    occurrences, places = counts.counts.unique(return_inverse=True)
    ids = torch.zeros(len(occurrences), dtype=torch.float64, device="cpu").index_add_(
        0, places, counts.weights
    )
    return ColumnDemand(counts, total, hot, shares, collision, (occurrences.double(), ids))


__all__ = ["ColumnDemand", "column_demand"]
