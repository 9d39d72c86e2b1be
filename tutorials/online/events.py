"""Writes clicks as they happen: users keep their tastes, but ads change, and new ones come all the
time.

An event is four numbers: its time in nanoseconds, a user, an ad, and whether the user clicked.
"""

from __future__ import annotations

import argparse
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tutorials.online.growing_file import ENDED

COLUMNS = 4  # of an event: TIME, USER, AD, CLICK
TIME, USER, AD, CLICK = range(COLUMNS)
Numbers = np.ndarray[Any, np.dtype[Any]]


class World(NamedTuple):
    """Users and ads that change.

    Attributes:
        users: number of users.
        ads: number of ads that are shown at a time.
        lifetime: days for which an ad is shown.
        turns: days in which the taste that an ad meets goes around once.
    """

    users: int = 1000
    ads: int = 60
    lifetime: float = 2.0
    turns: float = 6.0

    def events(self, days: Numbers, draw: np.random.Generator) -> Numbers:
        """Draw events without their times.

        Args:
            days: float [n], the simulated time of each, in days.
            draw: draws them.

        Returns:
            int64 [n, 3]: user, ad, click.
        """
        users = draw.integers(self.users, size=len(days))
        # ad k is shown from day (k - ads) * lifetime / ads on, for its lifetime
        newest = np.floor(days * self.ads / self.lifetime).astype(np.int64)
        ads = newest + draw.integers(self.ads, size=len(days))
        clicks = draw.random(len(days)) < self.chance(users, ads, days)
        return np.stack([users, ads, clicks.astype(np.int64)], axis=1)

    def chance(self, users: Numbers, ads: Numbers, days: Numbers) -> Numbers:
        """Return the chance of a click: how near the taste of the user is to that of the ad now."""
        taste = 2 * np.pi * _fraction(users, 1)
        appeal = 2 * np.pi * (_fraction(ads, 2) + days / self.turns)
        return 1 / (1 + np.exp(1.5 - 3 * np.cos(taste - appeal)))


def _fraction(ids: Numbers, salt: int) -> Numbers:
    """Return a number from 0 to 1 that is always the same for an id."""
    mixed = (ids.astype(np.uint64) * np.uint64(2) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(11)).astype(np.float64) / 2**53


def write(
    path: Path,
    *,
    rate: float,
    day: float,
    is_over: Callable[[], bool],
    world: World | None = None,
) -> None:
    """Append events at a rate, until they are over.

    Args:
        path: the file.
        rate: events of a second.
        day: seconds of a simulated day.
        is_over: returns whether to stop; it may wait for a few milliseconds.
        world: users and ads.
    """
    world, draw = world or World(), np.random.default_rng(1)
    written, began = 0, time.monotonic()
    with path.open("ab", buffering=0) as file:
        while not is_over():
            due = int((time.monotonic() - began) * rate)
            events = np.empty((due - written, COLUMNS), np.int64)
            events[:, USER:] = world.events(np.arange(written, due) / (rate * day), draw)
            events[:, TIME] = time.time_ns()
            file.write(events.tobytes())
            written = due
    path.with_name(ENDED).touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rate", type=float, default=3000.0, help="events of a second")
    parser.add_argument("--day", type=float, default=10.0, help="seconds of a simulated day")
    options = parser.parse_args()

    def is_over() -> bool:
        return bool(select.select([sys.stdin], [], [], 0.005)[0])  # when the input ends

    write(options.path, rate=options.rate, day=options.day, is_over=is_over)


if __name__ == "__main__":
    main()
