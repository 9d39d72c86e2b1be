"""Program that writes tables and plots of README.md and notes from the results in ``results/``.

It also draws the plot of the repository's README, from kept runs of the training job.

Of two rows of one case the newer one counts. A table stands below ``<!-- table: NAME -->``; what
lies between that line and the next empty one is replaced.

Example:
    python benchmarks/report.py            # tables and plots
    python benchmarks/report.py --check    # status 1 if a table differs; writes nothing
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from gpu import ledger
from reporting.kept import Kept, MissingRowError
from reporting.misses import UnexplainedError, misses_markdown
from reporting.plots import SWEEP, write_plots
from reporting.serving_topics import FILE_ROWS, LIVE_FILES, SERVING_LOAD, SHARED_TABLES
from reporting.topics import MANY, TABLES

HERE = Path(__file__).resolve().parent
PAGE, RESULTS = HERE / "README.md", HERE / "results"
NOTES = {
    "index.md": (MANY,),
    "serving.md": (SERVING_LOAD, FILE_ROWS, LIVE_FILES, SHARED_TABLES),
}
BLOCK = re.compile(r"^(<!-- table: ([\w-]+) -->\n)(?:.+\n)*", re.MULTILINE)


class MarkerError(Exception):
    """A page without the marker of a table, or with one of an unknown table."""


def blocks(kept: Kept) -> dict[str, str]:
    """Make all tables.

    Args:
        kept: rows of results.

    Returns:
        Markdown by the name in the markers.
    """
    made = {table.name: table.markdown(kept) for table in TABLES}
    return made | {
        "misses": misses_markdown(kept),
        "gpu": f"{ledger.sentence(ledger.load(ledger.PATH))} `make gpu-check` tests and times them "
        "on a machine with one ([notes](notes/gpu.md)).",
    }


def filled(page: str, made: dict[str, str]) -> str:
    """Replace the tables of a page.

    Args:
        page: Markdown with markers.
        made: tables by name.

    Returns:
        The page.

    Raises:
        MarkerError: the markers of the page and ``made`` differ, or a marker comes twice.
    """
    names = [match[2] for match in BLOCK.finditer(page)]
    if sorted(names) != sorted(made):
        wrong = sorted(set(names) ^ set(made)) or names
        raise MarkerError(
            f"markers {wrong} differ from the tables of report.py: expected one "
            "'<!-- table: NAME -->' for each table"
        )
    return BLOCK.sub(lambda match: f"{match[1]}{made[match[2]]}\n", page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write tables and plots, or compare the tables.

    Args:
        arguments: of the command line; None for those of this process.

    Returns:
        Status of the process: 1 for tables that differ, 2 for results that give no tables.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare the tables")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: benchmarks/README.md")
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="for all plots (default: their places)"
    )
    given = parser.parse_args(arguments)
    kept = Kept(RESULTS)
    try:
        made = {given.page: blocks(kept)}
        if given.page == PAGE:
            for page, tables in NOTES.items():
                made[HERE / "notes" / page] = {
                    table.name: table.markdown(kept, "../results") for table in tables
                }
        pages = {
            page: (page.read_text(), filled(page.read_text(), of)) for page, of in made.items()
        }
    except (MissingRowError, UnexplainedError, MarkerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.check:
        for page, (old, new) in pages.items():
            lines = difflib.unified_diff(
                old.splitlines(), new.splitlines(), str(page), "results/", lineterm="", n=0
            )
            print("\n".join(lines), end="")
        return int(any(new != old for old, new in pages.values()))
    for page, (_, new) in pages.items():
        page.write_text(new)
    image = SWEEP.with_suffix(".png")
    plots = (
        write_plots(kept, given.plots, given.plots / image.name)
        if given.plots
        else write_plots(kept, RESULTS, image)
    )
    for path in [*pages, *plots]:
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
