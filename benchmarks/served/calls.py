"""Timed calls, one by one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.timing import Timing

BENCH = "serving"


class Case(NamedTuple):
    """A size of requests.

    Attributes:
        batch, length: samples, and ids of each feature in one.
        target: largest ratio of medians that is wanted.
    """

    batch: int
    length: int
    target: float | None

    def name(self, language: str) -> str:
        """Return the name in rows and for ``--only``."""
        return f"{language}, B={self.batch} L={self.length}"


class Calls:
    """Timed calls, one by one.

    Args:
        run: the call.
        count: calls of a round.
    """

    def __init__(self, run: Callable[[], object], count: int) -> None:
        self._run, self._count = run, count
        self.rounds: list[list[float]] = []

    def __call__(self, number: int) -> float:
        taken = []
        for _ in range(self._count):
            begin = time.perf_counter()
            self._run()
            taken.append(1e3 * (time.perf_counter() - begin))
        self.rounds.append(taken)
        return statistics.median(taken)


def medians(rounds: Sequence[list[float]]) -> Timing:
    """Return the median of each round."""
    return Timing(tuple(map(statistics.median, rounds)))


def percentiles_99(rounds: Sequence[list[float]]) -> Timing:
    """Return the 99th percentile of each round."""
    return Timing(
        tuple(statistics.quantiles(taken, n=100, method="inclusive")[98] for taken in rounds)
    )
