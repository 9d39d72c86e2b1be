"""Streams of ids of known nature, for tests of extrapolations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def zipf(length: int, exponent: float, ids: int, seed: int) -> Ids:
    """Draws from a fixed set of ids; the n-th is drawn n^-exponent times as often as the first."""
    weights = np.cumsum(np.arange(1, ids + 1, dtype=np.float64) ** -exponent)
    drawn = np.random.default_rng(seed).random(length) * weights[-1]
    return np.searchsorted(weights, drawn).astype(np.int64)


def newcomers(length: int, share: float, seed: int) -> Ids:
    """Draws of which a part are ids that never were there, and as many are ids that came lately."""
    random = np.random.default_rng(seed)
    old = zipf(length, 1.05, 20_000, seed)
    kind = random.random(length)
    arrived = np.cumsum(kind < share)
    back = (random.pareto(1.1, length) * 20).astype(np.int64)
    recent = 20_000 + np.maximum(arrived - back, 0)
    return np.where(kind < share, 20_000 + arrived, np.where(kind < 2 * share, recent, old))


def drifting(length: int, seed: int) -> Ids:
    """Draws from a set of ids of which every 2,000 draws some leave for others."""
    return zipf(length, 1.1, 50_000, seed) + np.arange(length) // 2_000 * 37


def with_memory(length: int, discount: float, seed: int) -> Ids:
    """Draws of which each is a new id, or that of an earlier draw: a power law without end."""
    random = np.random.default_rng(seed)
    new, earlier = random.random(length), random.random(length)
    ids = np.empty(length, np.int64)
    known = 0
    for i in range(length):
        if new[i] < (100 + discount * known) / (100 + i):
            ids[i] = known
            known += 1
        else:
            ids[i] = ids[int(earlier[i] * i)]
    return ids


STREAMS: dict[str, Callable[[int, int], Ids]] = {
    "Zipf 1.05 of 10 million": lambda n, seed: zipf(n, 1.05, 10_000_000, seed),
    "Zipf 1.2 of 10 million": lambda n, seed: zipf(n, 1.2, 10_000_000, seed),
    "Zipf 1.5 of 10 million": lambda n, seed: zipf(n, 1.5, 10_000_000, seed),
    "Zipf 1.05 of 100,000": lambda n, seed: zipf(n, 1.05, 100_000, seed),
    "Zipf 0.7 of 100,000": lambda n, seed: zipf(n, 0.7, 100_000, seed),
    "Zipf 1.05 of 2,000": lambda n, seed: zipf(n, 1.05, 2_000, seed),
    "uniform of 30,000": lambda n, seed: zipf(n, 0.0, 30_000, seed),
    "5 % newcomers": lambda n, seed: newcomers(n, 0.05, seed),
    "1 % newcomers": lambda n, seed: newcomers(n, 0.01, seed),
    "drifting": drifting,
    "power law without end": lambda n, seed: with_memory(n, 0.6, seed),
    "every id new": lambda n, seed: np.arange(n),
}
