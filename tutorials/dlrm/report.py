"""The report of a run: one HTML file with its plots inside, and one plot beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from tutorials.dlrm.job.page import (
    Curves,
    by_feature,
    environment,
    image,
    lines,
    loss_and_auc,
    png,
    replace,
    table,
)
from tutorials.dlrm.loop import Point

_MIB = 2**20
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
p.summary { font-size: 1.15rem; border-left: 4px solid #1f77b4; padding-left: 1rem }
img { max-width: 100% }
table { border-collapse: collapse; font-size: 0.9rem }
td, th { text-align: left; vertical-align: top; padding: 0.15rem 1.5rem 0.15rem 0;
  border-bottom: 1px solid #ddd; overflow-wrap: anywhere }
"""


def write_report(
    folder: Path,
    curves: Curves,
    summary: Mapping[str, Any],
    settings: Mapping[str, object],
) -> None:
    """Write ``report.html`` and ``training.png``, each once it is complete.

    Args:
        folder: Gets them.
        curves: Those of the dynamic tables first; they have at least one point.
        summary: The result that the program prints at its end.
        settings: By name of the option.
    """
    curve = png(loss_and_auc(curves, summary["best_auc"]))
    (points, _), *_ = curves.values()
    page = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>DLRM with dynamic tables</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        "<h1>DLRM with dynamic tables</h1>",
        f'<p class="summary">{escape(conclusion(summary))}</p>',
        "<h2>Loss and AUC</h2>",
        "<p>The running AUC is of samples before they were trained on; the past fades. Dashed: the "
        "AUC on the held-out samples, after training.</p>",
        image(curve, "Loss and AUC against samples"),
        *_tables_over_time(points, settings["--capacity"]),
        *("<h2>Result</h2>", table(summary), "<h2>Settings</h2>", table(settings)),
        *("<h2>Machine and versions</h2>", table(environment(settings["--device"]))),
        "</body>\n</html>\n",
    ]
    replace(folder / "report.html", "\n".join(page).encode())
    replace(folder / "training.png", curve)


def conclusion(summary: Mapping[str, Any]) -> str:
    """Return the result of a run in one sentence.

    Args:
        summary: The result that the program prints at its end.

    Example:
        >>> print(conclusion({"samples": 1000, "auc": 0.75, "baseline_auc": 0.74, "best_auc": None,
        ...     "ids": 300, "table_bytes": 3 * 2**20, "evicted": 0, "samples_per_s": 5000.0}))
        After 1,000 samples the AUC on held-out samples is 0.7500, 0.0100 above that of hashed \
tables in the same memory; the tables have 300 ids in 3.0 MiB, and training took 5,000 samples a \
second.
    """
    auc, baseline, best = (summary[name] for name in ("auc", "baseline_auc", "best_auc"))
    if auc is None:
        trained = "the AUC is undefined, because the held-out samples have one label only"
    else:
        trained = f"the AUC on held-out samples is {auc:.4f}"
        compared = []
        if baseline is not None:
            side = "above" if auc >= baseline else "below"
            compared.append(
                f"{abs(auc - baseline):.4f} {side} that of hashed tables in the same memory"
            )
        if best is not None:
            compared.append(f"{best - auc:.4f} below the best that can be reached")
        trained += ", " * bool(compared) + " and ".join(compared)
    evicted = f" after {summary['evicted']:,} evictions" if summary["evicted"] else ""
    return (
        f"After {summary['samples']:,} samples {trained}; the tables have {summary['ids']:,} ids "
        f"in {summary['table_bytes'] / _MIB:,.1f} MiB{evicted}, and training took "
        f"{summary['samples_per_s']:,.0f} samples a second."
    )


def _tables_over_time(points: Sequence[Point], capacity: object) -> list[str]:
    """Return the sections about ids, memory, throughput and evictions."""
    samples = [point.samples for point in points]
    last = points[-1]
    memory = {
        "the process": [point.resident_bytes / _MIB for point in points],
        "tables: rows, optimizer state, index": [point.table_bytes / _MIB for point in points],
    }
    passed = np.diff([0, *samples])
    took = np.diff([0.0, *(point.seconds for point in points)])
    mean = last.samples / max(last.seconds, 1e-9)
    throughput = {
        "since the point before": list(passed / np.maximum(took, 1e-9)),
        "on average": [mean] * len(points),
    }
    evictions = []
    if evicted := sum(last.evicted):
        share = evicted / max(1, sum(last.ids))
        figure = by_feature(samples, [p.evicted for p in points], "ids evicted so far, by feature")
        evictions = [image(png(figure), "Evictions by feature against samples")]
        text = (
            f"{evicted:,} ids had to go for others, {share:.1f} for each id that is in the tables "
            "at the end."
        )
    elif capacity is None:
        text = "None: tables grow as long as ids come. --capacity bounds them."
    else:
        text = f"None with --capacity {capacity}."
    ids = by_feature(samples, [p.ids for p in points], "ids in the tables, by feature")
    return [
        "<h2>Ids</h2>",
        f"<p>{sum(last.ids):,} ids have a row at the end. A curve that goes on rising says that "
        "new ids keep coming.</p>",
        image(png(ids), "Ids in the tables against samples"),
        "<h2>Memory</h2>",
        "<p>The process also has code, libraries and the batches that are read.</p>",
        image(png(lines(samples, memory, "MiB in memory")), "Memory against samples"),
        "<h2>Throughput</h2>",
        f"<p>{mean:,.0f} samples a second on average, with reading and checkpoints.</p>",
        image(
            png(lines(samples, throughput, "samples trained on in a second")),
            "Samples a second against samples",
        ),
        "<h2>Evictions by feature</h2>",
        f"<p>{text}</p>",
        *evictions,
    ]
