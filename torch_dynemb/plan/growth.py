"""Extrapolation of the number of distinct ids to a longer stream."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch_dynemb.argument_checks import number
from torch_dynemb.plan.counting import IdCounts

_WINDOWS = 3  # halvings of the stream, with growth to compare
_DEVIATIONS = 1.96  # of a normal distribution, 95 % are within


class DistinctIds(NamedTuple):
    """Number of distinct ids, with an interval.

    Attributes:
        low: lower end.
        expected: the estimate.
        high: upper end.
    """

    low: float
    expected: float
    high: float


def distinct_ids(counts: IdCounts, times: float) -> DistinctIds:
    """Estimate the distinct ids of a stream from the counts of a sample, with an interval.

    *expected*: Heaps' law, distinct ids = c lines^b (Heaps 1978). The b is that of the last half of
    the lines; it declines further at its rate since the first eighth.

    *high*: the same with the largest b of the last three halvings of the lines, plus a margin for
    chance. This b does not decline. It is at most 1: the rate of new ids then stays constant.

    *low*: the extrapolation of Colwell et al. (2012), minus a margin for chance. It uses the lower
    bound of Chao (1984) on unseen ids, from the numbers of ids that occur once and twice.

    The README of this package has the accuracy and width of the interval. The estimate knows only
    changes that the sample shows: sample days, not an hour, in the order of time.

    Args:
        counts: of the first lines of the stream.
        times: length of the stream as a multiple of the sample, at least 1.

    Raises:
        TypeError: ``times`` is not a number.
        ValueError: ``times`` is less than 1, or not finite.

    Example:
        >>> import torch
        >>> from torch_dynemb.plan.counting import IdCounter
        >>> counter = IdCounter()
        >>> ids = torch.arange(1000).square() % 331
        >>> counter.add(ids, torch.arange(1000), lines=1000)
        >>> distinct_ids(counter.counts(), 10).expected  # all squares are there already
        166.0
    """
    times = number("distinct_ids: times", times)
    if not 1 <= times < math.inf:
        raise ValueError(f"distinct_ids: times is {times}, expected a finite number of at least 1")
    now = counts.distinct
    weights = counts.weights
    left_out = _DEVIATIONS * float((weights * (weights - 1)).sum()) ** 0.5  # the sample's chance
    if times == 1 or now == 0:
        return DistinctIds(now - left_out, now, now + left_out)
    exponents = [_Exponent.of(counts, halvings) for halvings in range(_WINDOWS)]
    expected = now * math.exp(_declining(exponents, math.log(times)))
    steepest = min(1.0, max(exponent.most for exponent in exponents))
    high = (now + left_out) * times**steepest
    unseen = min(_colwell(counts, times), expected) - now
    low = now - left_out + max(0.0, unseen - _DEVIATIONS * math.sqrt(max(unseen, 0.0)))
    low = min(low, high)
    return DistinctIds(low, min(max(expected, low), high), high)


class _Exponent(NamedTuple):
    """Exponent of Heaps' law between half of some lines and all of them; ``most``: plus chance."""

    value: float
    most: float

    @classmethod
    def of(cls, counts: IdCounts, halvings: int) -> _Exponent:
        end = counts.lines / 2**halvings
        both = float(counts.weights[counts.first < end].sum())
        before = counts.first < end / 2
        half = float(counts.weights[before].sum())
        if half == 0 or both == 0:
            return cls(1.0, 1.0)
        # chance: of n new ids it adds or takes sqrt(n), more where each stands for several
        new = counts.weights[(counts.first < end) & ~before]
        chance = max(float((new * new).sum()) ** 0.5, 1.0) / both
        value = math.log2(both / half)
        return cls(value, value + _DEVIATIONS * chance / math.log(2))


def _declining(exponents: list[_Exponent], log_times: float) -> float:
    """Return the logarithm of the growth, with an exponent that declines at its past rate."""
    now, before = exponents[0].value, exponents[-1].value
    decline = max(0.0, before - now) / math.log(2 ** (_WINDOWS - 1))  # for each e-fold of lines
    until = log_times if decline == 0 else min(log_times, now / decline)
    return now * until - decline * until * until / 2


def _colwell(counts: IdCounts, times: float) -> float:
    lookups, once, twice = counts.lookups, counts.seen(1), counts.seen(2)
    unseen = once * once / (2 * twice) if twice > 0 else once * (once - 1) / 2
    unseen *= (lookups - 1) / lookups
    if unseen <= 0:
        return counts.distinct
    share = min(once / (lookups * unseen + once), 1 - 1e-12)
    return counts.distinct - unseen * math.expm1(lookups * (times - 1) * math.log1p(-share))


__all__ = ["DistinctIds", "distinct_ids"]
