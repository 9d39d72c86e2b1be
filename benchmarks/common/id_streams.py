"""Streams of ids: distinct 64-bit ids without a table of those seen, uniform and Zipf draws."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_MULTIPLIERS = (_signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9))
EXPONENT = 1.05  # of Zipf draws
_LOW_32, _LOW_35 = (1 << 32) - 1, (1 << 35) - 1


def spread(numbers: Tensor) -> Tensor:
    """Map int64 numbers to int64 ids all over the 64-bit range, one to one.

    Multiplications by odd numbers and xor-shifts are bijections of 64-bit words, so different
    numbers give different ids.

    Args:
        numbers: int64 [N].

    Returns:
        int64 [N].
    """
    mixed = numbers * _MULTIPLIERS[0]
    mixed ^= (mixed >> 32) & _LOW_32
    mixed *= _MULTIPLIERS[1]
    mixed ^= (mixed >> 29) & _LOW_35
    return mixed


def distinct_ids(first: int, count: int) -> Tensor:
    """Return the ids of numbers ``first`` to ``first + count - 1``: int64 [count]."""
    return spread(torch.arange(first, first + count))


class UniformNumbers:
    """Numbers below ``limit``, all equally likely."""

    def __init__(self, limit: int, *, seed: int) -> None:
        self._limit = limit
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> Tensor:
        """Return int64 [count]."""
        return torch.randint(self._limit, (count,), generator=self._generator)


class ZipfNumbers:
    """Numbers below ``limit`` with P(rank k) proportional to k**-exponent, ranks shuffled."""

    def __init__(
        self,
        limit: int,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        exponent: float = EXPONENT,
    ) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        ranks = torch.arange(1, limit + 1, dtype=torch.float64, device=device)
        weights = ranks.pow_(-exponent)
        self._cumulative = weights.cumsum(0).div_(weights.sum())
        self._number_of_rank = torch.randperm(limit, generator=self._generator, device=device)

    def draw(self, count: int) -> Tensor:
        """Return int64 [count]."""
        return self._number_of_rank[self._ranks(count)]

    def restart(self, seed: int) -> None:
        """Draw on from another seed; every number keeps its probability."""
        self._generator.manual_seed(seed)

    def _ranks(self, count: int) -> Tensor:
        device = self._generator.device
        draws = torch.rand(count, dtype=torch.float64, generator=self._generator, device=device)
        ranks = torch.searchsorted(self._cumulative, draws)
        return ranks.clamp_(max=len(self._number_of_rank) - 1)


class DriftingZipfNumbers(ZipfNumbers):
    """As :class:`ZipfNumbers`, but ranks rotate: numbers rise in popularity, the first goes last.

    Args:
        drift: ranks by which a number rises from one draw to the next.
    """

    def __init__(self, limit: int, *, seed: int, drift: float) -> None:
        super().__init__(limit, seed=seed)
        self._drift = drift
        self._draws = 0

    def draw(self, count: int) -> Tensor:
        """Return int64 [count]."""
        shift = int(self._draws * self._drift)
        self._draws += 1
        return self._number_of_rank[(self._ranks(count) + shift) % len(self._number_of_rank)]
