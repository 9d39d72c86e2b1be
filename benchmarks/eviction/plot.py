"""The plot of first evictions: inserts that evict against rows in use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from eviction.reference import FillCurve
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

_COLOURS = ("tab:blue", "tab:orange")


def draw(curves: Mapping[str, FillCurve], path: Path) -> None:
    """Draws a PNG.

    Args:
        curves: By name, at most two.
        path: The file to write.
    """
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")  # without pyplot: needs no display
    axes = figure.subplots()
    for (name, curve), colour in zip(curves.items(), _COLOURS, strict=False):
        axes.plot(curve.used, curve.evicting, colour, lw=1.8, label=name)
        first = curve.used_at_first
        axes.plot(first, 0, "o", color=colour, ms=5, clip_on=False)
        axes.annotate(
            f"first at {first:.0%}",
            (first, 0),
            xytext=(-8, 10),
            textcoords="offset points",
            ha="right",
            color=colour,
        )
    axes.set_xlabel("rows in use")
    axes.set_ylabel("inserts that evict")
    axes.set_xlim(0.5, 1.005)
    axes.set_ylim(0, 1.05)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    axes.set_title("New random ids into a table that fills up", fontsize=10)
    figure.savefig(path, format="png", dpi=110)
