"""Formatting of descriptions of saved tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def in_bytes(count: float) -> str:
    """Format a number of bytes with a suitable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format lines with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column > 0 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def optimizer_name(saved: Mapping[str, Any] | None) -> str:
    """Format the name of a saved optimizer, with state dtypes other than float32."""
    if saved is None:
        return "none"
    small = sorted({dtype for _, per_row, dtype in saved["state"] if not per_row} - {"float32"})
    return " ".join([saved["name"], *(f"({dtype} state)" for dtype in small)])


__all__ = ["aligned", "in_bytes", "optimizer_name"]
