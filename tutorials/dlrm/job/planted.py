"""A planted click model: samples in the Criteo layout with known click probabilities.

A sample has 13 integers and 26 categories. What makes it resemble click logs, and what makes it
hard for a table of fixed size:

* The categories have Criteo's cardinalities, all divided by the same number. Within a feature the
  popularity of categories follows Zipf's law.
* Categories come and go. Feature f has a fixed list of popularities, but the categories in
  its places change: each place goes to a new category ``turnover`` times during the run, at
  a moment of its own. With the long tail of Zipf's law this makes new ids appear until the end.
* The log-odds of a click are a sum: one effect per category, effects of the integers, and products
  of latent vectors for a few pairs of features. Effects of categories are drawn once, from a
  heavy-tailed distribution (most near zero, some large).

Everything is a function of the configuration: sample i is the same whatever is generated before
it and however many samples are generated at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutorials.dlrm.data import (
    CATEGORY_COUNT,
    INTEGER_COUNT,
    MISSING_ID,
    MISSING_INTEGER,
    Int64Array,
)

UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]

# Distinct categories per feature in the 45.8 M samples of the Criteo Kaggle data.
CRITEO_CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)

# Share of missing values, near those of the Criteo data.
_INTEGER_MISSING = (0.45, 0.0, 0.2, 0.2, 0.03, 0.24, 0.05, 0.001, 0.05, 0.45, 0.05, 0.77, 0.2)
_CATEGORY_MISSING = (
    *(0, 0, 0.04, 0.04, 0, 0.13, 0, 0, 0, 0, 0, 0.04, 0),
    *(0, 0, 0.04, 0, 0, 0.42, 0.42, 0.04, 0.76, 0, 0.04, 0.42, 0.42),
)

# Integers are exp(median + spread * normal) rounded down, shifted so that some are 0 or below.
_INTEGER_MEDIAN = (0.3, 1.5, 2.0, 1.9, 7.5, 3.5, 1.8, 2.2, 3.8, 0.2, 0.7, 0.2, 1.8)
_INTEGER_SPREAD = (1.2, 1.8, 1.4, 1.1, 2.0, 1.7, 1.6, 1.1, 1.6, 0.6, 0.9, 0.8, 1.3)
_INTEGER_SHIFT = (1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)

CHUNK = 1 << 16  # samples that share a random stream
_LATENT = 4  # length of the latent vectors behind an interaction
_EPOCHS = 1 << 8  # holders a place can have had, at most


@dataclass(frozen=True)
class PlantedConfig:
    """Settings of generated samples.

    Args:
        samples: Number of samples.
        seed: Seed of everything drawn.
        cardinality_divisor: Criteo's cardinalities are divided by this.
        zipf_exponent: Popularity of the k-th category is proportional to ``k ** -zipf_exponent``.
        turnover: How often a place in the popularity list changes its holder during the run, for
            features of more than ``stable_cardinality`` categories.
        stable_cardinality: Features of at most so many categories keep them.
        click_log_odds: Log-odds of a click before any effect.
        integer_scale: Standard deviation of the sum of the integers' effects on the log-odds.
        category_scale: The same for the categories.
        interaction_scale: The same for the interactions.
    """

    samples: int = 1_800_000
    seed: int = 0
    cardinality_divisor: float = 12.0
    zipf_exponent: float = 1.05
    turnover: float = 0.3
    stable_cardinality: int = 100
    click_log_odds: float = -1.2
    integer_scale: float = 0.8
    category_scale: float = 1.7
    interaction_scale: float = 0.3

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or above, got {self.seed}")
        if not self.cardinality_divisor >= 1:
            raise ValueError(
                f"cardinality_divisor must be at least 1, got {self.cardinality_divisor}"
            )
        if not 0 <= self.turnover < _EPOCHS - 1:
            raise ValueError(f"turnover must be from 0 to below {_EPOCHS - 1}, got {self.turnover}")


class Samples(NamedTuple):
    """Generated samples; the first three are as :class:`tutorials.dlrm.data.Batch` has them."""

    labels: npt.NDArray[np.float32]  # (N,)
    integers: Int64Array  # (N, 13)
    ids: Int64Array  # (26, N)
    probabilities: Float64Array  # (N,) that the label is 1


class PlantedModel:
    """Generator of the samples of one configuration."""

    def __init__(self, config: PlantedConfig) -> None:
        self.config = config
        rng = np.random.default_rng([config.seed, 1])
        self.cardinalities = [
            max(min(c, 3), round(c / config.cardinality_divisor)) for c in CRITEO_CARDINALITIES
        ]
        self._salts = rng.integers(1 << 63, size=CATEGORY_COUNT, dtype=np.uint64)
        self._cumulative = [_zipf(c, config.zipf_exponent) for c in self.cardinalities]
        slopes = rng.normal(size=INTEGER_COUNT)
        missing = rng.normal(size=INTEGER_COUNT) * np.sqrt(_INTEGER_MISSING)
        norm = np.sqrt(np.sum(slopes**2) + np.sum(missing**2))
        self._integer_slopes = config.integer_scale * slopes / norm
        self._integer_missing = config.integer_scale * missing / norm
        shares = np.log(self.cardinalities)  # features of many categories say more
        moments = [self._effect_moments(f) for f in range(CATEGORY_COUNT)]
        self._effect_means = [mean for mean, _ in moments]
        self._effect_scales = [
            config.category_scale * np.sqrt(share / shares.sum()) / deviation
            for share, (_, deviation) in zip(shares, moments, strict=True)
        ]
        small = [f for f, c in enumerate(self.cardinalities) if 5 <= c <= 1000]
        self._pairs = [tuple(rng.choice(small, size=2, replace=False)) for _ in range(3)]

    def draw(self, begin: int, end: int) -> Samples:
        """Draw samples ``begin`` to ``end``.

        Args:
            begin: Index of the first sample; a multiple of CHUNK.
            end: Index past the last sample.
        """
        if begin % CHUNK:
            raise ValueError(f"begin must be a multiple of {CHUNK}, got {begin}")
        return _join([self._chunk(b, min(b + CHUNK, end)) for b in range(begin, end, CHUNK)])

    def _chunk(self, begin: int, end: int) -> Samples:
        config = self.config
        # All draws are made for the whole chunk, so that its samples do not depend on `end`.
        rng = np.random.default_rng([config.seed, 2, begin // CHUNK])
        time = (begin + np.arange(CHUNK)) / config.samples
        logits = np.full(CHUNK, config.click_log_odds)

        median, spread = np.asarray(_INTEGER_MEDIAN), np.asarray(_INTEGER_SPREAD)
        values = np.exp(median + spread * rng.standard_normal((CHUNK, INTEGER_COUNT)))
        values = np.minimum(np.floor(values), 9e7)
        integers = values.astype(np.int64) - np.asarray(_INTEGER_SHIFT)
        missing = rng.random((CHUNK, INTEGER_COUNT)) < _INTEGER_MISSING
        integers[missing] = MISSING_INTEGER
        # The effect is that of the integer as it is written, which is all a model can know.
        bent = np.tanh((np.log(values + 0.5) - median) / spread)
        logits += np.where(missing, self._integer_missing, self._integer_slopes * bent).sum(1)

        ids = np.empty((CATEGORY_COUNT, CHUNK), dtype=np.int64)
        keys = np.empty((CATEGORY_COUNT, CHUNK), dtype=np.uint64)
        for feature in range(CATEGORY_COUNT):
            cumulative = self._cumulative[feature]
            places = np.searchsorted(cumulative, rng.random(CHUNK), side="right")
            ids[feature] = self._holders(feature, places, time)
            absent = rng.random(CHUNK) < _CATEGORY_MISSING[feature]
            ids[feature, absent] = MISSING_ID
            keys[feature] = self._keys(feature, ids[feature])
            effects = _heavy_tailed(keys[feature]) - self._effect_means[feature]
            logits += self._effect_scales[feature] * effects
        for f, g in self._pairs:
            product = np.zeros(CHUNK)
            for k in range(_LATENT):
                tag = np.uint64(k + 1)
                product += _normal(_mix64(keys[f] + tag)) * _normal(_mix64(keys[g] + tag))
            logits += config.interaction_scale / np.sqrt(_LATENT * len(self._pairs)) * product

        probabilities = 1 / (1 + np.exp(-logits))
        labels = (rng.random(CHUNK) < probabilities).astype(np.float32)
        n = end - begin
        return Samples(labels[:n], integers[:n], ids[:, :n], probabilities[:n])

    def _holders(self, feature: int, places: Int64Array, time: Float64Array) -> Int64Array:
        """Return the ids that hold places of the popularity list at some time."""
        holders = places.astype(np.uint64)
        if self.cardinalities[feature] > self.config.stable_cardinality:
            phases = _uniform(_mix64(holders ^ ~self._salts[feature]))
            epochs = (self.config.turnover * time + phases).astype(np.uint64)
            holders = holders * np.uint64(_EPOCHS) + epochs
        return _scramble32(holders, self._salts[feature])

    def _keys(self, feature: int, ids: Int64Array) -> UInt64Array:
        """Return what everything about an id is derived from."""
        return _mix64(ids.view(np.uint64) ^ self._salts[feature])

    def _effect_moments(self, feature: int) -> tuple[float, float]:
        """Return mean and standard deviation of a feature's raw effects at the beginning."""
        places = np.arange(self.cardinalities[feature])
        popularity = np.diff(self._cumulative[feature], prepend=0.0)
        missing = _CATEGORY_MISSING[feature]
        weights = np.append(popularity * (1 - missing), missing)
        ids = np.append(self._holders(feature, places, np.zeros(len(places))), MISSING_ID)
        effects = _heavy_tailed(self._keys(feature, ids))
        mean = float(weights @ effects)
        return mean, float(np.sqrt(weights @ (effects - mean) ** 2))


def _zipf(cardinality: int, exponent: float) -> Float64Array:
    """Return cumulative probabilities, of which the last is 1."""
    cumulative = np.cumsum(np.arange(1, cardinality + 1, dtype=np.float64) ** -exponent)
    cumulative /= cumulative[-1]
    cumulative[-1] = 1.0
    return cumulative


def _mix64(x: UInt64Array) -> UInt64Array:
    """Return splitMix64's output function (Steele, Lea, Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _scramble32(x: UInt64Array, salt: np.uint64) -> Int64Array:
    """Permute the numbers below 2**32, so that ids look like hashes and none meets another."""
    mask = np.uint64(0xFFFFFFFF)
    x = (x ^ salt) & mask
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):  # MurmurHash3's 32-bit finalizer
        x = ((x ^ (x >> np.uint64(16))) * np.uint64(multiplier)) & mask
    x ^= x >> np.uint64(16)
    return x.view(np.int64)


def _uniform(keys: UInt64Array) -> Float64Array:
    """Map to (0, 1), neither end included."""
    uniform: Float64Array = (keys >> np.uint64(12)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-52
    return uniform


def _heavy_tailed(keys: UInt64Array) -> Float64Array:
    """Map to a symmetric distribution: most near 0, a few large (an exponential to the 1.5)."""
    u = _uniform(keys) - 0.5
    sizes: Float64Array = (-np.log1p(-2 * np.abs(u))) ** 1.5
    return np.copysign(sizes, u)


def _normal(keys: UInt64Array) -> Float64Array:
    """Map to mean 0 and variance 1, roughly normal: a sum of uniforms."""
    total = np.full(keys.shape, -2.0)
    for k in range(4):
        total += _uniform(_mix64(keys + np.uint64(k << 32)))
    total *= np.sqrt(3.0)
    return total


def _join(parts: list[Samples]) -> Samples:
    return Samples(
        np.concatenate([p.labels for p in parts]),
        np.concatenate([p.integers for p in parts]),
        np.concatenate([p.ids for p in parts], axis=1),
        np.concatenate([p.probabilities for p in parts]),
    )
