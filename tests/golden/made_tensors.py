"""Ids, gradients and rows that are equal on every machine: whole numbers and powers of two only."""

from __future__ import annotations

import torch
from torch import Tensor

_PRIME = 2147483647  # 2^31 - 1: squares of what is below it fit in int64
_FRACTION_BITS = 23


def numbers(count: int, below: int, *, seed: int) -> Tensor:
    """Make whole numbers without a pattern.

    Returns:
        int64 [count], from 0 to ``below - 1``.
    """
    state = torch.arange(count, dtype=torch.int64) * 48271 + (seed + 1) * 1_000_003
    for _ in range(3):
        state = state % _PRIME
        state = state * state + 1013 * (seed + 1)
    return (state % _PRIME >> 4) % below


def ids(*shape: int, below: int, seed: int) -> Tensor:
    """Make ids of which some come often, of both signs, the least and the largest int64 included.

    Args:
        shape: of the result.
        below: at most so many ids differ.
        seed: of the numbers.
    """
    count = torch.Size(shape).numel()
    first = numbers(count, below, seed=2 * seed)
    ranks = first * numbers(count, below, seed=2 * seed + 1) // below
    return spread(ranks).reshape(shape)


def spread(ranks: Tensor) -> Tensor:
    """Make an id of each number from 0 on: distinct ones, far apart."""
    of_ranks = (ranks - 9) * 70_368_744_177_663
    of_ranks = torch.where(ranks == 1, -(2**63), of_ranks)
    return torch.where(ranks == 2, 2**63 - 1, of_ranks)


def values(*shape: int, seed: int) -> Tensor:
    """Make float32 in [-1, 1) with all 24 bits in use, so that sums of them are rounded."""
    count = torch.Size(shape).numel()
    drawn = numbers(count, 1 << _FRACTION_BITS + 1, seed=seed) - (1 << _FRACTION_BITS)
    return (drawn.to(torch.float32) / (1 << _FRACTION_BITS)).reshape(shape)


def short_values(*shape: int, seed: int) -> Tensor:
    """Make multiples of 1/8 in [-2, 2): sums of them, and of their squares, are exact."""
    count = torch.Size(shape).numel()
    return ((numbers(count, 32, seed=seed) - 16).to(torch.float32) / 8).reshape(shape)
