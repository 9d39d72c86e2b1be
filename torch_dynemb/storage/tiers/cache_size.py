"""The number of rows of a table that stay in memory."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from torch_dynemb.argument_checks import described
from torch_dynemb.policy.admission import parse_bytes

LEAST_SLOTS = 64
_ALL = 1 << 62  # more than any table has
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_ROWS = re.compile(r"\s*([0-9][0-9_]*)\s*rows\s*")


@dataclass(frozen=True)
class CacheSize:
    """Number of rows that stay in memory, in one of three units.

    Attributes:
        value: in the unit.
        unit: ``"bytes"``, of rows with their optimizer state; ``"rows"``; or ``"fraction"``, of the
            current rows of the tables.
    """

    value: float
    unit: Literal["bytes", "rows", "fraction"]

    def slots(self, rows: int, slot_bytes: int, share: float) -> int:
        """Return the number of slots of a slab.

        Args:
            rows: number of the slab's rows.
            slot_bytes: memory of a slot with its row.
            share: of the slab among all slabs, from 0 to 1.
        """
        if self.unit == "fraction" and self.value == 1:
            return _ALL  # includes rows that a step adds
        if self.unit == "fraction":
            wanted = self.value * rows
        else:
            wanted = self.value * share / (slot_bytes if self.unit == "bytes" else 1)
        return max(LEAST_SLOTS, int(wanted))

    def part(self, of: int, rows: int, row_bytes: int) -> int:
        """Return the bytes that a part of the rows gets.

        Args:
            of: bytes of this part's rows.
            rows, row_bytes: number and bytes of all rows that share the cache.
        """
        if self.unit == "fraction":
            return int(self.value * of)
        return int(self.value * of / max(1, rows if self.unit == "rows" else row_bytes))

    def most_slots(self, given: str, rows: int, slot_bytes: int, share: float) -> int:
        """Return the most slots that the cache of a slab on a GPU should have.

        Args:
            given: the argument, for an error.
            rows: that the slab may have.
            slot_bytes: memory of a slot with its row.
            share: of the slab in the cache, from 0 to 1.

        Raises:
            ValueError: no row fits into the cache.
        """
        if self.unit == "fraction":
            return max(1, min(rows, max(LEAST_SLOTS, math.ceil(self.value * rows))))
        slots = int(self.value * share / (slot_bytes if self.unit == "bytes" else 1))
        if slots == 0:
            raise ValueError(
                f"TableGroup: {given}, of which the rows of one dim get a share of {share:.2g}, "
                f"less than one row of {slot_bytes} bytes: give it more"
            )
        return min(rows, slots)


def parse_cache(owner: str, value: object) -> CacheSize:
    """Return the cache size that an argument describes.

    Args:
        owner: beginning of an error's message.
        value: bytes (an int, or a text such as ``"4GB"``), a text such as ``"100000 rows"``, or a
            fraction (a float from 0 to 1, or a text such as ``"25%"``).

    Raises:
        TypeError: it is neither a number nor a text.
        ValueError: it has another form, or is not more than 0.
    """
    if isinstance(value, bool) or not isinstance(value, Integral | float | str):
        raise TypeError(
            f"{owner} is {described(value)}, expected bytes (4 << 30 or '4GB'), '100000 rows', or "
            "a fraction of the rows (0.25 or '25%')"
        )
    if isinstance(value, str) and (percent := _PERCENT.fullmatch(value)):
        return _fraction(owner, value, float(percent[1]) / 100)
    if isinstance(value, str) and (rows := _ROWS.fullmatch(value)):
        return CacheSize(_positive(owner, value, int(rows[1])), "rows")
    if isinstance(value, float):
        return _fraction(owner, value, value)
    return CacheSize(parse_bytes(owner, value if isinstance(value, str) else int(value)), "bytes")


def _fraction(owner: str, given: object, value: float) -> CacheSize:
    if not 0 < value <= 1:
        raise ValueError(f"{owner} is {given!r}, expected a fraction above 0, and 1 at most")
    return CacheSize(value, "fraction")


def _positive(owner: str, given: object, value: int) -> int:
    if value <= 0:
        raise ValueError(f"{owner} is {given!r}, expected 1 row at least")
    return value


__all__ = ["LEAST_SLOTS", "CacheSize", "parse_cache"]
