"""Targets that are not met: one line for each group of them, with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .kept import Kept, KeptRow, key_of
from .tables import figure, markdown


class UnexplainedError(LookupError):
    """A missed target without a reason, or a reason without a missed target."""


@dataclass(frozen=True)
class Miss:
    """Missed targets with one reason.

    Attributes:
        name: of the group.
        bench: name of the benchmark.
        pattern: matches the whole text "case: peer" of its rows.
        why: the reason, a sentence.
    """

    name: str
    bench: str
    pattern: str
    why: str

    def matches(self, kept: KeptRow) -> bool:
        """Return whether a row belongs to the group."""
        bench, case, peer = key_of(kept.row)
        return bench == self.bench and re.fullmatch(self.pattern, f"{case}: {peer}") is not None


MISSES: tuple[Miss, ...] = ()


def missed_rows(kept: Kept, misses: tuple[Miss, ...]) -> dict[Miss, list[KeptRow]]:
    """Sort rows that miss their target by the reason.

    Raises:
        UnexplainedError: a row has no reason, or a reason has no row.
    """
    found: dict[Miss, list[KeptRow]] = {miss: [] for miss in misses}
    for row in kept:
        if not row.missed:
            continue
        reasons = [miss for miss in misses if miss.matches(row)]
        if not reasons:
            raise UnexplainedError(
                f"{key_of(row.row)} of {row.source.name} misses its target: add the reason to "
                "MISSES in benchmarks/reporting/misses.py"
            )
        found[reasons[0]].append(row)
    if unused := [miss.name for miss, rows in found.items() if not rows]:
        raise UnexplainedError(
            f"{unused[0]!r} meets its target now: remove it from MISSES in "
            "benchmarks/reporting/misses.py"
        )
    return found


def misses_markdown(kept: Kept, misses: tuple[Miss, ...] = MISSES) -> str:
    """Return the table of missed targets.

    Raises:
        UnexplainedError: see :func:`missed_rows`.
    """
    lines = []
    for miss, rows in missed_rows(kept, misses).items():
        values = [row.row["ratio"] if "target" in row.row else row.row["value"] for row in rows]
        targets = [row.target for row in rows if row.target is not None]
        lines.append([miss.name, _range(values), _range(targets, "{:.3g}"), miss.why])
    return markdown(["goal", "measured", "target", "why"], lines)


def _range(values: list[float], form: str = "") -> str:
    """Return the smallest and the largest value, or the only one."""
    texts = [form.format(value) if form else figure(value) for value in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"
