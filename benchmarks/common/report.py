"""Rows of results: made, printed, written and read; as JSON lines, a JSON file or a table.

It needs no torch: ``gpu/check.py`` writes results and holds no GPU.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .timing import Timing

VALID_SHARE = 0.7  # of the rate that was noted for a peer on the machine where targets were set

Row = dict[str, Any]


def _short(value: float) -> float:
    """Round to five digits."""
    return float(f"{value:.5g}")


def _shortened(extra: Mapping[str, Any]) -> Row:
    return {key: _short(v) if isinstance(v, float) else v for key, v in extra.items()}


def compare(
    bench: str,
    case: str,
    ours: Timing,
    peer_name: str | None,
    peer: Timing | None,
    *,
    target: float | None = None,
    noted_ms: float | None = None,
    **extra: Any,
) -> Row:
    """Return a row that sets our time against a peer's, or says our time alone.

    Args:
        bench: benchmark.
        case: what was timed.
        ours: our timing.
        peer_name: the peer; None: there is none.
        peer: its timing; None: there is none, and what depends on it is null.
        target: largest ratio of medians, ours/peer, that meets the target; None: no target.
        noted_ms: the peer's time where targets were set; slower than that by 1/0.7, the row is
            marked invalid. None: none was noted.
        extra: further keys of the row.

    Returns:
        The row.
    """
    ratio = None if peer is None else ours.median_ms / peer.median_ms
    row: Row = {
        "bench": bench,
        "case": case,
        "ours_ms": _short(ours.median_ms),
        "peer": peer_name,
        "peer_ms": None if peer is None else _short(peer.median_ms),
        "ratio": None if ratio is None else _short(ratio),
        "ours_min_ms": _short(ours.min_ms),
        "peer_min_ms": None if peer is None else _short(peer.min_ms),
        "ratio_min": None if peer is None else _short(ours.min_ms / peer.min_ms),
        "rounds": len(ours.rounds_ms),
    }
    if target is not None and ratio is not None:
        row |= {"target": _short(target), "met": ratio <= target}
    row["valid"] = True
    if noted_ms is not None and peer is not None:
        row["peer_noted_ms"] = _short(noted_ms)
        if peer.median_ms * VALID_SHARE > noted_ms:
            row["valid"] = False
            row["reason"] = (
                f"{peer_name} ran at {noted_ms / peer.median_ms:.2f}x of the rate noted for it; "
                f"a row counts from {VALID_SHARE}x on"
            )
    return row | _shortened(extra)


def quantity(
    bench: str, case: str, value: float, unit: str, *, target: float | None = None, **extra: Any
) -> Row:
    """Return a row for a quantity other than a time, set against its target as the peer.

    Args:
        bench: benchmark.
        case: what was measured.
        value: the quantity.
        unit: its unit.
        target: largest value that meets the target; None: no target.
        extra: further keys of the row.

    Returns:
        The row: ``ours_ms`` and ``peer_ms`` are null, ``ratio`` is value / target, null for 0.
    """
    row: Row = {
        "bench": bench,
        "case": case,
        "ours_ms": None,
        "peer": "target" if target is not None else None,
        "peer_ms": None,
        "ratio": _short(value / target) if target else None,
        "value": _short(value),
        "unit": unit,
    }
    if target is not None:
        row |= {"target_value": _short(target), "met": value <= target}
    row["valid"] = True
    return row | _shortened(extra)


def failure(bench: str, case: str, reason: str) -> Row:
    """Return a row for what could not be measured."""
    return {
        "bench": bench,
        "case": case,
        "ours_ms": None,
        "peer": None,
        "peer_ms": None,
        "ratio": None,
        "valid": False,
        "reason": reason,
    }


class Report:
    """Printer of rows: as they come (JSON lines) or as a table at the end; progress on stderr.

    Args:
        as_json: print JSON lines.
        cases: rows that are expected, for the progress bar.

    Attributes:
        rows: what was reported.
    """

    def __init__(self, *, as_json: bool, cases: int) -> None:
        from tqdm import tqdm

        self.rows: list[Row] = []
        self._as_json = as_json
        self._bar = tqdm(total=cases, unit="case", file=sys.stderr)

    def start(self, case: str) -> None:
        """Show the name of the case under way."""
        self._bar.set_description(case)

    def add(self, row: Row) -> None:
        """Take a row."""
        self.rows.append(row)
        self._bar.update()
        if self._as_json:
            self._bar.clear()
            print(json.dumps(row), flush=True)

    def take(self, items: Iterable[Row | str]) -> None:
        """Take what a measurement yields: the name of each case as it starts, then its rows."""
        for item in items:
            self.start(item) if isinstance(item, str) else self.add(item)

    def close(self) -> None:
        """End the progress bar; print the table unless JSON was asked for."""
        self._bar.close()
        if not self._as_json:
            print(table(self.rows))


def table(rows: list[Row]) -> str:
    """Return rows as text in aligned columns."""
    header = ["bench", "case", "ours", "peer", "peer's", "ratio", "target", "met"]
    cells = [header]
    for row in rows:
        ours = peer = target = ""
        if row["ours_ms"] is not None:
            ours = f"{row['ours_ms']:.4g} ms"
            peer = f"{row['peer_ms']:.4g} ms" if row["peer_ms"] is not None else ""
            target = f"{row['target']:.3g}" if "target" in row else ""
        elif "value" in row:  # not of a failure
            ours = f"{row['value']:g} {row['unit']}"
            target = f"{row['target_value']:g}" if "target_value" in row else ""
        met = {True: "yes", False: "no", None: ""}[row.get("met")]
        ratio = f"{row['ratio']:.3f}" if row["ratio"] is not None else ""
        if not row["valid"]:
            met = "invalid"
        cells.append([row["bench"], row["case"], ours, row["peer"] or "", peer, ratio, target, met])
    reasons = sorted({row["reason"] for row in rows if not row["valid"]})
    return "\n".join([*aligned(cells), *(f"invalid: {reason}" for reason in reasons)])


def aligned(cells: list[list[str]]) -> list[str]:
    """Return lines of cells in columns, with a rule below the first."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return [line.rstrip() for line in lines]


class RowFile:
    """Rows in a file, a JSON line each, on disk as soon as they are there.

    Args:
        path: overwritten; None: rows go to stdout only.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = None if path is None else path.open("w")

    def add(self, row: Row) -> None:
        """Write a row to the file and to stdout."""
        line = json.dumps(row)
        print(line, flush=True)
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()


def read_rows(path: Path) -> list[Row]:
    """Return rows of a :class:`RowFile`; none if the file is missing.

    A program that was killed may have left half a line, which is left out.
    """
    rows: list[Row] = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def write_results(path: Path, machine: Mapping[str, Any], rows: list[Row]) -> None:
    """Write a result to keep: what it was measured on, and its rows, a line each."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    description = json.dumps(machine, indent=1)
    path.write_text(f'{{"machine": {description},\n"rows": [\n{lines}\n]}}\n')


def slug(name: str) -> str:
    """Return a device's name for file names, such as ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
