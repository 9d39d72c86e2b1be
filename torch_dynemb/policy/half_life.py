"""Half-lives of decayed counts, and the counts as floats."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_dynemb.argument_checks import integer, seconds
from torch_dynemb.ops.columns import (
    DECAY_BITS,
    MAX_COUNT,
    MOST_HALF_LIVES,
    NEVER_OCCURRED,
    WAITING_BASE,
)

MOST_HALF_LIFE = 1 << 32  # seconds or steps


def parse_half_life(owner: str, value: object) -> int:
    """Return seconds, from a number or a text such as ``"7d"``.

    Args:
        owner: beginning of an error's message.
        value: an int, or a number with the unit s, m, h, d or w.

    Raises:
        TypeError: it is something else.
        ValueError: it is not from 1 second to 2^32.
    """
    parsed = seconds(owner, value)
    check_half_life(owner, value, parsed)
    return parsed


def check_half_life(owner: str, given: object, ticks: int) -> None:
    """Raise ValueError unless a half-life is from 1 to 2^32 seconds or steps."""
    if not 1 <= ticks <= MOST_HALF_LIFE:
        raise ValueError(f"{owner} is {given!r}, expected from 1 to 2^32")


def check_half_lives(
    owner: str,
    half_life: object,
    half_life_steps: object,
    decays: bool,
    given: str,
    wanted: str,
) -> None:
    """Raise TypeError or ValueError unless one half-life is given, or none where nothing decays.

    Args:
        owner: beginning of an error's message.
        half_life, half_life_steps: as given.
        decays: whether one of them is needed.
        given: the argument that decides it, with its value.
        wanted: the value with which it is needed.
    """
    if half_life is not None:
        parse_half_life(f"{owner}: half_life", half_life)
    if half_life_steps is not None:
        steps = integer(f"{owner}: half_life_steps", half_life_steps)
        check_half_life(f"{owner}: half_life_steps", steps, steps)
    missing = [half_life, half_life_steps].count(None)
    if decays and missing != 1:
        raise ValueError(
            f"{owner}: {given}, half_life is {half_life!r} and half_life_steps is "
            f"{half_life_steps!r}: decayed counts need one of them, such as half_life='7d'"
        )
    if not decays and missing != 2:
        raise ValueError(
            f"{owner}: half_life is {half_life!r} and half_life_steps is {half_life_steps!r}, but "
            f"{given}: they are for {wanted}"
        )


def ticks_of(owner: str, half_life: int | str | None, half_life_steps: int | None) -> int:
    """Return a half-life in seconds; below 0: in steps; 0: there is none.

    Args:
        owner: beginning of an error's message.
        half_life, half_life_steps: as checked by :func:`check_half_lives`.
    """
    if half_life is not None:
        return parse_half_life(f"{owner}: half_life", half_life)
    return -int(half_life_steps or 0)


def half_lives(time: int, half_life: int) -> float:
    """Return the half-lives from time 0 to a time, as kernels count them.

    Args:
        time: in seconds or steps.
        half_life: in the same unit.
    """
    return min(max(time, 0) / half_life, float(MOST_HALF_LIVES))


def time_of(half_life: int, *, step: int, now: int) -> float:
    """Return the half-lives from time 0 to a clock.

    Args:
        half_life: of a policy, ``half_life_ticks``: seconds; below 0: steps.
        step, now: of the clock.
    """
    return half_lives(step, -half_life) if half_life < 0 else half_lives(now, half_life)


def with_half_life(logarithms: Tensor, old: int, new: int, *, step: int, now: int) -> Tensor:
    """Return logarithms with another half-life, and the same counts at a clock.

    Args:
        logarithms: int64, as tables store them.
        old, new: half-lives as ``half_life_ticks``.
        step, now: of the clock.
    """
    if old in (0, new):
        return logarithms
    before, after = (time_of(ticks, step=step, now=now) for ticks in (old, new))
    shift = math.floor((after - before) * (1 << DECAY_BITS))
    return torch.where(logarithms > NEVER_OCCURRED // 2, logarithms + shift, logarithms)


def counts_of(logarithms: Tensor, now: float) -> Tensor:
    """Return decayed counts as of now, float64.

    Args:
        logarithms: int64, as tables store them.
        now: half-lives since time 0.
    """
    # in integers first: float64 holds neither 2^32 half-lives nor their 30 bits exactly
    whole = math.floor(now)
    since = (logarithms - (whole << DECAY_BITS)).double() / (1 << DECAY_BITS) - (now - whole)
    return torch.where(logarithms > NEVER_OCCURRED // 2, torch.exp2(since), 0.0)


def logarithms_of(counts: Tensor, now: float) -> Tensor:
    """Return what tables store of decayed counts, int64.

    Args:
        counts: as of now, float64, from 0 on.
        now: half-lives since time 0.
    """
    whole = math.floor(now)
    logarithms = ((torch.log2(counts) + (now - whole)) * (1 << DECAY_BITS)).round()
    found = counts > 0
    return torch.where(
        found,
        torch.where(found, logarithms, 0.0).long() + (whole << DECAY_BITS),
        torch.full_like(counts, NEVER_OCCURRED, dtype=torch.int64),
    )


def waiting_with_half_life(stored: Tensor, old: int, new: int, *, step: int, now: int) -> Tensor:
    """Return counts of ids that wait for admission, with another half-life as of a clock.

    Args:
        stored: int64 [n], as counters store them: occurrences, or logarithms with a half-life.
        old, new: half-lives in seconds, below 0 in steps; 0: occurrences do not decay.
        step, now: of the clock.

    Returns:
        int64 [n]; 0 where no occurrence is left.
    """
    if old == new:
        return stored
    if new == 0:
        counts = counts_of(stored - WAITING_BASE, time_of(old, step=step, now=now))
        return counts.round().clamp(max=(1 << 31) - 1).long()
    if old == 0:
        logarithms = logarithms_of(stored.double(), time_of(new, step=step, now=now))
    else:
        logarithms = with_half_life(stored - WAITING_BASE, old, new, step=step, now=now)
    return (logarithms + WAITING_BASE).clamp(1, MAX_COUNT)


__all__ = [
    "MOST_HALF_LIFE",
    "check_half_life",
    "check_half_lives",
    "counts_of",
    "half_lives",
    "logarithms_of",
    "parse_half_life",
    "ticks_of",
    "time_of",
    "waiting_with_half_life",
    "with_half_life",
]
