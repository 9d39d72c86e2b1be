"""Samples of ids by hash, by which miss rates of large tables are those of small ones (SHARDS).

Ids with a hash below a bound are replayed, in tables with capacities scaled alike (Waldspurger,
Park, Garthwaite, Ahmad 2015). Misses are divided by the expected number of lookups, not by that in
the sample: it depends on a few frequent ids, which hit in any case (their SHARDS-adj).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from torch_dynemb.plan.counting import IdCounts, hashes

MOST_LOOKUPS = 4_000_000_000  # in all tables, if the share of ids is chosen automatically
_LEAST_IDS = 4096  # of a column with evictions
GROUPS = 16  # of sampled ids, for the spread


def automatic_share(lookups: int, combinations: int) -> float:
    """Return the share of ids to replay: 1, or less if all would take too long."""
    return min(1.0, MOST_LOOKUPS / max(lookups * combinations, 1))


def rates(
    counts: Mapping[str, IdCounts], capacities: Sequence[Mapping[str, int]], share: float
) -> dict[str, float]:
    """Return the share of the ids to replay, by column.

    Of a column with evictions, 4,096 ids at least are replayed.

    Args:
        counts: of the ids of each column.
        capacities: rows by column, for each capacity of the replay.
        share: of the ids of large columns.
    """
    result = {}
    for name, column in counts.items():
        fits = all(rows[name] >= column.distinct for rows in capacities)
        least = 0.0 if fits or column.distinct == 0 else _LEAST_IDS / column.distinct
        result[name] = min(1.0, max(share, least))
    return result


def is_sampled(ids: Tensor, rate: float) -> Tensor:
    """Return a mask of ids in the sample, bool [n]."""
    return hashes(ids) < int(rate * (1 << 63))


def group_of(ids: Tensor) -> Tensor:
    """Return the group of each id, int64 [n] from 0 to :data:`GROUPS` - 1."""
    return hashes(ids) % GROUPS


def spread(misses: Tensor, column_rates: Sequence[float]) -> float:
    """Return the standard error of estimated misses of all columns.

    Args:
        misses: int64 [columns, groups], of the sampled ids.
        column_rates: share of the ids that were replayed, of each column.
    """
    variance = 0.0
    for column, rate in zip(misses.double(), column_rates, strict=True):
        variance += (1 - rate) * float(column.var()) * GROUPS / rate**2
    return math.sqrt(variance)


__all__ = ["GROUPS", "MOST_LOOKUPS", "automatic_share", "group_of", "is_sampled", "rates", "spread"]
