"""Merging of rows and scores of several sharding groups, in the order of the groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.ops.columns import MAX_COUNT, WAITING_BASE
from torch_dynemb.policy.half_life import counts_of, logarithms_of

_MOST_WAITING = (1 << 31) - 1
_LEAST = -(1 << 63)


class OfGroups(NamedTuple):
    """A number of n ids in G groups, and in the base that the groups had in common.

    Attributes:
        values: int64 [G, n].
        here: bool [G, n], whether the group has the id.
        restarted: bool [G, n], whether the id lost its row since the base, and has a new one.
        base: int64 [n].
        known: bool [n], whether the base has the id.
    """

    values: Tensor
    here: Tensor
    restarted: Tensor
    base: Tensor
    known: Tensor

    @property
    def moved(self) -> Tensor:
        """bool [G, n], where a group has another value than the base."""
        return self.here & ((self.values != self.base) | self.restarted | ~self.known)


def mean_of(values: Sequence[Tensor]) -> Tensor:
    """Return the mean of tensors of several groups; of integers the largest.

    Sums are taken in the order of the groups: of float32 in float64, of shorter floats in float32.
    So equal values have this mean exactly.

    Args:
        values: by group, of one shape and dtype.
    """
    dtype = values[0].dtype
    if not dtype.is_floating_point:
        return torch.stack(list(values)).amax(0)
    total = values[0].to(torch.float64 if dtype == torch.float32 else torch.float32)
    for of_group in values[1:]:
        total = total + of_group
    return (total / len(values)).to(dtype)


def latest(of: OfGroups) -> Tensor:
    """Return the largest value of the groups that have an id, int64 [n]."""
    return torch.where(of.here, of.values, _LEAST).amax(0)


def last_given(of: OfGroups) -> Tensor:
    """Return the largest of the values that differ from the base; that of the base if none does."""
    largest = torch.where(of.moved, of.values, _LEAST).amax(0)
    return torch.where(of.moved.any(0), largest, of.base)


def summed(of: OfGroups) -> Tensor:
    """Return the base with what all groups have added to it, int64 [n]."""
    since = torch.where(of.restarted, of.values, of.values - of.base)
    return of.base + torch.where(of.here, since, 0).sum(0)


def frequency(of: OfGroups, waiting: Tensor, waiting_base: Tensor) -> Tensor:
    """Return occurrences: those of the base, and those that each group has counted since.

    An id that is new since the base keeps the count by which it was admitted. Occurrences count in
    groups where it still waits, too.

    Args:
        of: frequencies.
        waiting: int64 [G, n], counts of admission in each group; 0: none.
        waiting_base: int64 [n], those of the base.
    """
    base = torch.where(of.known, of.base, waiting_base)
    restarted = of.restarted | (of.values < base)
    since = torch.where(restarted, of.values, of.values - base)
    elsewhere = torch.where(of.known, 0, (waiting - waiting_base).clamp(min=0))
    total = base + torch.where(of.here, since, elsewhere).sum(0)
    return total.clamp(0, MAX_COUNT)


def decayed(of: OfGroups, now: float) -> Tensor:
    """Return the sum of decayed counts, as tables store it.

    Args:
        of: decayed counts as tables store them.
        now: half-lives since time 0.
    """
    base = torch.where(of.known, counts_of(of.base, now), 0.0)
    total = base
    for values, here, restarted in zip(of.values, of.here, of.restarted, strict=True):
        since = counts_of(values, now) - torch.where(restarted, 0.0, base)
        total = total + torch.where(here, since, 0.0)
    merged = logarithms_of(total.clamp(min=0.0), now)
    # exact where at most one group has counted
    moved = of.moved
    alone = (moved.sum(0) == 1) & ~(moved & of.restarted & of.known).any(0)
    merged = torch.where(alone, torch.where(moved, of.values, _LEAST).amax(0), merged)
    return torch.where(moved.any(0), merged, of.base)


def waiting_counts(values: Tensor, base: Tensor, now: float | None) -> Tensor:
    """Return counts of admission: those of the base, and what each group has added since.

    Args:
        values: int64 [G, n], of each group; 0: none.
        base: int64 [n].
        now: half-lives since time 0; None: counts do not decay.

    Returns:
        int64 [n]; 0: none.
    """
    if now is None:
        return (base + (values - base).sum(0)).clamp(0, _MOST_WAITING)
    before = _occurrences(base, now)
    total = before
    for of_group in values:
        total = total + (_occurrences(of_group, now) - before)
    merged = (logarithms_of(total.clamp(min=0.0), now) + WAITING_BASE).clamp(1, MAX_COUNT)
    return torch.where(total > 0, merged, 0)


def _occurrences(stored: Tensor, now: float) -> Tensor:
    """Return decayed counts of admission as floats; 0 where there is none."""
    return torch.where(stored > 0, counts_of(stored - WAITING_BASE, now), 0.0)


__all__ = [
    "OfGroups",
    "decayed",
    "frequency",
    "last_given",
    "latest",
    "mean_of",
    "summed",
    "waiting_counts",
]
