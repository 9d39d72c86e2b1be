"""Comparison of two results: rows that got slower.

Machines differ and are noisy. A row that has a peer is therefore compared by its ratio to the peer,
which took turns with ours. A time without a peer is compared only if both results name the same
machine. Like :mod:`.report`, this needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .report import Row, aligned

SLOWER = 1.10  # times what it was; messages say 10 %
TIME_UNITS = ("ns", "us", "ms", "s")
# facts of machine.description that change without the machine
_NOT_OF_THE_MACHINE = {"commit", "date", "torch", "python", "driver", "cuda"}
Key = tuple[str, str, str]  # bench, case, peer


class ResultsError(Exception):
    """A file that cannot be compared with."""


@dataclass(frozen=True)
class Results:
    """Content of a file of results.

    Attributes:
        name: of the file, for people.
        machine: what :func:`.machine.description` says.
        rows: by bench, case and peer; the peer of a row that has none is ''.
    """

    name: str
    machine: Mapping[str, Any]
    rows: dict[Key, Row]

    def described(self) -> str:
        """Return the file, and where and when it was measured."""
        facts = [self.machine.get(fact) for fact in ("device", "processor", "date", "commit")]
        return f"{self.name} ({', '.join(str(fact) for fact in facts if fact)})"


@dataclass(frozen=True)
class Change:
    """A row in two results.

    Attributes:
        key: bench, case and peer.
        unit: ``x`` for a ratio to the peer, else the unit of the times.
        old: the ratio, or the time.
        new: likewise.
        change: new / old, of medians or of minima, whichever is closer to 1; 1 where one of them
            rose and the other did not.
    """

    key: Key
    unit: str
    old: float
    new: float
    change: float


@dataclass
class Comparison:
    """Rows of two results by their change.

    Attributes:
        slower: by more than 10 %, the worst first.
        faster: by more than 10 %, likewise.
        alike: number of the other rows that were compared.
        left_out: rows of both results that cannot be compared, by the reason.
        only_old: rows that only the earlier result has.
        only_new: rows that only the later result has.
    """

    slower: list[Change] = field(default_factory=list)
    faster: list[Change] = field(default_factory=list)
    alike: int = 0
    left_out: dict[str, list[Key]] = field(default_factory=dict)
    only_old: list[Key] = field(default_factory=list)
    only_new: list[Key] = field(default_factory=list)

    @property
    def compared(self) -> int:
        """Number of rows that were compared."""
        return len(self.slower) + len(self.faster) + self.alike


def results_of(name: str, machine: Mapping[str, Any], rows: Iterable[Row]) -> Results:
    """Return results from rows.

    Raises:
        ResultsError: two rows have the same bench, case and peer.
    """
    by_key: dict[Key, Row] = {}
    for row in rows:
        key = (row["bench"], row["case"], row["peer"] or "")
        if key in by_key:
            raise ResultsError(
                f"{name}: two rows are of {_said(key)}, so it is unclear which counts"
            )
        by_key[key] = row
    return Results(name, machine, by_key)


def read_results(path: Path) -> Results:
    """Read what ``benchmarks/run.py --save`` has written.

    Raises:
        ResultsError: the file is missing, or has another format.
    """
    expected = "expected a file that `run.py --save` has written"
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ResultsError(f"{path} cannot be read ({error.strerror}): {expected}") from error
    except ValueError as error:  # no JSON, or no text
        raise ResultsError(f"{path} is not JSON ({error}): {expected}") from error
    machine, rows = (
        (content.get("machine"), content.get("rows")) if isinstance(content, dict) else (None, None)
    )
    if not isinstance(machine, dict) or not isinstance(rows, list):
        raise ResultsError(f"{path} has no machine and rows: {expected}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or (wrong := _wrong_in(row)):
            what = wrong if isinstance(row, dict) else "is not an object"
            raise ResultsError(f"{path}: row {number} {what}: {expected}")
    return results_of(path.name, machine, rows)


def _wrong_in(row: Row) -> str:
    """Return the reason why a row is not compared, or ''."""
    for name in ("bench", "case"):
        if not isinstance(row.get(name), str):
            return f"has {name} {row.get(name)!r}, expected a text"
    if not isinstance(row.get("peer"), str | None):
        return f"has peer {row['peer']!r}, expected a text or null"
    if not isinstance(row.get("valid"), bool):
        return f"has valid {row.get('valid')!r}, expected true or false"
    for name in ("ours_ms", "peer_ms", "ratio", "value", "value_min", "ours_min_ms", "ratio_min"):
        number = row.get(name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
            return f"has {name} {number!r}, expected a number or null"
    if row["valid"] and row.get("ours_ms") is None and "value" not in row:
        return "has neither ours_ms nor value"
    return ""


def same_machine(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether two descriptions are of one kind of machine, so that times can be compared."""
    facts = {*old, *new} - _NOT_OF_THE_MACHINE
    return all(old.get(fact) == new.get(fact) for fact in facts)


def compare_results(old: Results, new: Results) -> Comparison:
    """Compare two results, row by row.

    A row got slower where its median and its minimum did by more than 10 %: noise of a shared
    machine moves one of them more easily than both.

    Args:
        old: the earlier result.
        new: the later one.
    """
    one_machine = same_machine(old.machine, new.machine)
    result = Comparison(
        only_old=[key for key in old.rows if key not in new.rows],
        only_new=[key for key in new.rows if key not in old.rows],
    )
    for key, before in old.rows.items():
        if key not in new.rows:
            continue
        found = _change(key, before, new.rows[key], one_machine=one_machine)
        if isinstance(found, str):
            result.left_out.setdefault(found, []).append(key)
        elif found.change > SLOWER:
            result.slower.append(found)
        elif found.change < 1 / SLOWER:
            result.faster.append(found)
        else:
            result.alike += 1
    result.slower.sort(key=lambda change: -change.change)
    result.faster.sort(key=lambda change: change.change)
    return result


def _change(key: Key, old: Row, new: Row, *, one_machine: bool) -> Change | str:
    """Return the change of a row, or why it has none."""
    if not old["valid"] or not new["valid"]:
        return "the row is not valid in one of the files"
    units = [row.get("unit", "ms") for row in (old, new)]
    if units[0] != units[1] or (old["ours_ms"] is None) != (new["ours_ms"] is None):
        return "the two files give it in different units"
    unit = units[0]
    if old["ours_ms"] is None:
        if unit.split()[0] not in TIME_UNITS:
            return "it is not a time"
        names = ("value", "value_min")
    elif old.get("ratio") is not None and new.get("ratio") is not None:
        unit, names = "x", ("ratio", "ratio_min")
    else:
        names = ("ours_ms", "ours_min_ms")
    if unit != "x" and not one_machine:
        return "it is a time without a peer, and the machines differ"
    pairs = [(old.get(name), new.get(name)) for name in names]
    pairs = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
    if any(before <= 0 for before, _ in pairs):
        return "it took no time"
    changes = [after / before for before, after in pairs]
    if min(changes) <= 1 <= max(changes):
        change = 1.0
    else:
        change = min(changes, key=lambda ratio: abs(math.log(ratio)) if ratio > 0 else math.inf)
    return Change(key, unit, *pairs[0], change)


def report_of(comparison: Comparison, old: Results, new: Results) -> str:
    """Return the text of a comparison, in whole lines."""
    lines = [new.described(), f"against {old.described()}:"]
    if not same_machine(old.machine, new.machine):
        lines.append("The machines differ: only ratios to a peer are compared.")
    lines.append(
        f"{comparison.compared} rows compared, {len(comparison.slower)} slower and "
        f"{len(comparison.faster)} faster by more than 10 %."
    )
    for word, changes in (("Slower", comparison.slower), ("Faster", comparison.faster)):
        if changes:
            lines += ["", f"{word}:", *_change_lines(changes)]
    for reason, keys in comparison.left_out.items():
        lines += ["", f"Not compared, because {reason}: {len(keys)} rows"]
        if reason != "it is not a time":
            lines += [f"  {_said(key)}" for key in keys]
    for which, keys in ((old.name, comparison.only_old), (new.name, comparison.only_new)):
        if keys:
            lines += [
                "",
                f"Only in {which}: {len(keys)} rows",
                *(f"  {_said(key)}" for key in keys),
            ]
    return "\n".join(lines)


def _change_lines(changes: list[Change]) -> list[str]:
    cells = [["bench", "case", "peer", "before", "now", "change"]]
    for of in changes:
        values = [f"{value:.4g} {of.unit}" for value in (of.old, of.new)]
        cells.append([*of.key, *values, f"{of.change - 1:+.0%}"])
    return aligned(cells)


def _said(key: Key) -> str:
    bench, case, peer = key
    return f"{bench}, {case}: {peer}" if peer else f"{bench}, {case}"
