"""Parts of a report, and its numbers as texts."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """Part of a report.

    Attributes:
        title: title of the part.
        rows: rows of a table, headers first; empty: no table.
        notes: sentences below the table.
    """

    title: str
    rows: list[list[str]]
    notes: list[str]


def count(number: float) -> str:
    """Format a number of things."""
    return f"{number:,.0f}"


def percent(share: float) -> str:
    """Format a share."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def share(some: float, whole: float) -> str:
    """Format a part of a whole."""
    return percent(some / whole) if whole else "-"


__all__ = ["Part", "count", "percent", "share"]
