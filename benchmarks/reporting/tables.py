"""Markdown tables of kept rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .kept import Kept, KeptRow, sources_of

RESULTS = "results"  # folder of the files that a table links to


@dataclass(frozen=True)
class Cell:
    """Figures of some rows, side by side in one cell.

    Attributes:
        bench: name of the benchmark.
        cases: of the rows, in order.
        peer: of all of them, or one for each case.
        shows: key of the figure in a row, such as "ratio" or "value".
        unit: behind the figures; for a time, "ms" or "us".
        scale: factor from the row's figure to the shown one.
    """

    bench: str
    cases: tuple[str, ...]
    peer: str | tuple[str, ...] = ""
    shows: str = "ratio"
    unit: str = ""
    scale: float = 1.0

    def rows(self, kept: Kept) -> list[KeptRow]:
        """Look up the rows."""
        peers = (self.peer,) * len(self.cases) if isinstance(self.peer, str) else self.peer
        return [
            kept.get(self.bench, case, peer) for case, peer in zip(self.cases, peers, strict=True)
        ]


Line = tuple[str, Sequence[Cell | None]]


@dataclass(frozen=True)
class Table:
    """A table of the README.

    Attributes:
        name: in its markers.
        title: above the first column.
        columns: titles of the others.
        lines: name of each line, and its cells; None for an empty one.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]

    def rows(self, kept: Kept) -> list[KeptRow]:
        """List all rows that the table shows."""
        cells = [cell for _, line in self.lines for cell in line if cell is not None]
        return [row for cell in cells for row in cell.rows(kept)]

    def markdown(self, kept: Kept, results: str = RESULTS) -> str:
        """Return the table; its first title links to the files of its rows, in ``results``."""
        sources = sources_of(self.rows(kept))
        links = [
            f"[{of.processor}, {of.date}{', ' + of.note if of.note else ''}]({results}/{of.name})"
            for of in sources
        ]
        lines = [
            [name, *("" if cell is None else cell_text(cell, kept) for cell in line)]
            for name, line in self.lines
        ]
        return markdown([f"**{self.title}** ({'; '.join(links)})", *self.columns], lines)


def markdown(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table.

    Raises:
        ValueError: a line has another number of cells than there are titles.
    """
    if wrong := [line for line in lines if len(line) != len(titles)]:
        raise ValueError(f"line {wrong[0]}: expected {len(titles)} cells, as {titles} has")
    rule = "|" + "---|" * len(titles)
    return "\n".join(
        ["| " + " | ".join(titles) + " |", rule, *(f"| {' | '.join(line)} |" for line in lines)]
    )


def figure(value: float) -> str:
    """Return a number with three digits that count, or all before the point."""
    for least, digits in ((100, 0), (10, 1), (0.2, 2), (0.01, 3)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.2g}"


def cell_text(cell: Cell, kept: Kept) -> str:
    """Return figures with their unit and target: bold ones miss it, those with † do not count."""
    rows = cell.rows(kept)
    texts = [_marked(cell, row) for row in rows]
    text = " / ".join(texts) + (f" {cell.unit}" if cell.unit else "")
    targets = [f"{row.target * cell.scale:.3g}" for row in rows if row.target is not None]
    if not targets or cell.shows not in ("ratio", "value"):
        return text
    limits = dict.fromkeys(targets) if len(targets) == len(rows) else {targets[0]: None}
    return f"{text} ≤ {' / '.join(limits)}"


def _marked(cell: Cell, row: KeptRow) -> str:
    """Return one figure with its mark."""
    text = figure(row.row[cell.shows] * cell.scale)
    if cell.shows not in ("ratio", "value"):
        return text
    if not row.row["valid"]:
        return f"{text}†"
    return f"**{text}**" if row.missed else text
