"""The plot of training steps: every optimizer with float32 and with bfloat16 rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from common.report import Row
from matplotlib.figure import Figure

_BAR = 0.4  # of the distance between optimizers
_LABELS = (("float32 rows", "tab:blue"), ("bfloat16 rows", "tab:orange"))


def draw(times: Mapping[str, tuple[float, float]], title: str, path: Path) -> None:
    """Draws a PNG.

    Args:
        times: By optimizer, ms of a step with float32 and with bfloat16 rows.
        title: Of the plot.
        path: The file to write.
    """
    names = sorted(times, key=lambda name: times[name][0])
    height = 1.3 + 0.36 * len(names)
    figure = Figure(figsize=(7.2, height), layout="constrained")  # no pyplot: needs no display
    axes = figure.subplots()
    for i, (label, colour) in enumerate(_LABELS):
        places = [number + (i - 0.5) * _BAR for number in range(len(names))]
        values = [times[name][i] for name in names]
        bars = axes.barh(places, values, _BAR, color=colour, label=label)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()  # the fastest on top
    axes.margins(x=0.08, y=0.02)
    axes.set_xlabel("ms a step (forward, backward and update), the fastest round")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right")
    axes.set_title(title, fontsize=9)
    figure.savefig(path, format="png", dpi=110)


def plot_rows(rows: list[Row], path: Path) -> None:
    """Draws the steps of all optimizers in float32 and bfloat16, as far as rows have them."""
    steps = [
        row
        for row in rows
        if row["ours_ms"] is not None
        and (row["row_dtype"], row["state_dtype"]) == ("bf16", "fp32")
        and (row["stochastic"], row["micro_batches"], row["draw"]) == (True, 0, "uniform")
    ]
    if not steps:
        raise SystemExit("no rows of bf16 steps with uniform ids to plot: leave --only out")
    dim = max(row["dim"] for row in steps)
    # minima: optimizers did not take turns with each other, only the dtypes of one did
    times = {r["optimizer"]: (r["peer_min_ms"], r["ours_min_ms"]) for r in steps if r["dim"] == dim}
    some = steps[0]
    draw(
        times,
        f"One training step: {some['rows']:,} rows, D={dim}, {some['batch']} bags of "
        f"{some['bag']} uniform ids, {some['threads']} threads",
        path,
    )
