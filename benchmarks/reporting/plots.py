"""Plots of kept rows, in one style."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from tutorials.dlrm.sweeps import capacity
from tutorials.dlrm.sweeps.job_runs import JobRuns
from tutorials.dlrm.sweeps.style import BLUE, GREY, ORANGE, STYLE, WIDTH

from .kept import Kept

LINE = 0.3  # inches of a line of a horizontal plot
BAR = 0.38  # of the distance between two lines


def _figure(height: float) -> tuple[Figure, Axes]:
    """Make a figure without pyplot, which would need a display."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _name_lines(axes: Axes, names: Sequence[str]) -> None:
    """Name the lines of a horizontal plot, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(len(names) - 0.5, -0.5)


def optimizers(kept: Kept) -> Figure:
    """Draw the training step of each optimizer with float32 and bfloat16 rows.

    Bars are fastest rounds: optimizers did not take turns with each other, only the dtypes of one.
    """
    steps = [
        of.row
        for of in kept
        if of.row["bench"] == "optimizers"
        and (of.row.get("row_dtype"), of.row.get("state_dtype")) == ("bf16", "fp32")
        and (of.row.get("stochastic"), of.row.get("micro_batches")) == (True, 0)
        and of.row.get("draw") == "uniform"
    ]
    dim = max(row["dim"] for row in steps)
    times = {r["optimizer"]: (r["peer_min_ms"], r["ours_min_ms"]) for r in steps if r["dim"] == dim}
    names = sorted(times, key=lambda name: times[name][0])
    figure, axes = _figure(1.0 + LINE * len(names))
    for number, (label, colour) in enumerate((("float32", BLUE), ("bfloat16", ORANGE))):
        places = [line + (number - 0.5) * BAR for line in range(len(names))]
        values = [times[name][number] for name in names]
        bars = axes.barh(places, values, BAR, color=colour, label=f"{label} rows")
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=7, color=GREY)
    _name_lines(axes, names)
    axes.margins(x=0.08)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("ms a step: forward, backward and update, the fastest round")
    axes.legend(loc="upper right")
    some = steps[0]
    figure.suptitle(
        f"Training step by optimizer: {some['rows']:,} rows, D={dim}, "
        f"{some['batch']:,} bags of {some['bag']} uniform ids, {some['threads']} threads",
        x=0.01,
        ha="left",
        size=STYLE["axes.titlesize"],
    )
    return figure


def feature_ops(kept: Kept) -> Figure:
    """Draw the time of ops on 40 features, as shares of one call a feature and of PyTorch."""
    rows = [of.row for of in kept if of.row["bench"] == "feature_ops"]
    ratio = {(row["case"], row["peer"]): row["ratio"] for row in rows}
    names = list(dict.fromkeys(row["case"].rsplit(", ", 1)[0] for row in rows))
    figure = Figure(figsize=(WIDTH, 1.2 + LINE * len(names)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    sizes = (("large", "256 rows of 1 to 200 values"), ("small", "64 rows of 1 to 3 values"))
    for axes, (size, title) in zip(panels, sizes, strict=True):
        for peer, colour, marker in (
            ("one call a feature", BLUE, "o"),
            ("PyTorch", ORANGE, "D"),
        ):
            values = [ratio[f"{name}, {size}", peer] for name in names]
            axes.plot(
                values, range(len(names)), marker, color=colour, ms=5.5, label=f"against {peer}"
            )
        _name_lines(axes, names)
        axes.axvline(1, color=GREY, lw=1)
        axes.set_xscale("log")
        axes.set_xlim(0.02, 3)
        axes.xaxis.set_major_locator(FixedLocator([0.03, 0.1, 0.3, 1, 3]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_title(title)
        axes.set_xlabel("time of one call for all / the peer's")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def first_evictions(kept: Kept) -> Figure:
    """Draw the share of inserts that evict while a table fills up."""
    figure, axes = _figure(3.4)
    case = "rows unused at the first eviction"
    ours = kept.get("lifecycle", case, "target").row
    bucket = kept.get("lifecycle", f"{case}, one bucket of 128 slots").row
    lines = (
        ("dynamic table", ours, BLUE),
        ("one bucket of 128 slots an id (simulated)", bucket, ORANGE),
    )
    for name, row, colour in lines:
        axes.plot(row["used"], row["evicting"], color=colour, lw=2, label=name)
        first = 1 - row["value"] / 100
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
    axes.legend(loc="upper left")
    axes.set_title(f"New ids into a table of {ours['capacity']:,} rows that fills up")
    return figure


def dlrm_step(kept: Kept) -> Figure:
    """Draw the samples a second of a whole DLRM with dynamic tables and with static ones."""
    batch = 8192
    rows = [of.row for of in kept if of.row["bench"] == "dlrm" and of.row["peer"]]
    eager = [row for row in rows if row["case"] == f"rowwise-adagrad B={batch}, eager"]
    speeds = {row["peer"]: row["peer_samples_per_s"] for row in eager}
    speeds["torch_dynemb, ids as they are"] = eager[0]["samples_per_s"]
    names = sorted(speeds, key=speeds.__getitem__, reverse=True)
    figure, axes = _figure(1.1 + LINE * len(names))
    colours = [BLUE if name.startswith("torch_dynemb") else ORANGE for name in names]
    bars = axes.barh(names, [speeds[name] for name in names], 2 * BAR, color=colours)
    axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=7, color=GREY)
    _name_lines(axes, names)
    axes.margins(x=0.14)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("samples a second: forward, backward and update")
    figure.suptitle(
        f"Training a DLRM with 26 features, batches of {batch:,}, {eager[0]['threads']} threads",
        x=0.01,
        ha="left",
        size=STYLE["axes.titlesize"],
    )
    return figure


PLOTS: dict[str, Callable[[Kept], Figure]] = {
    "optimizers.png": optimizers,
    "feature-ops.png": feature_ops,
    "first-evictions.png": first_evictions,
    "dlrm-step.png": dlrm_step,
}


SWEEP = Path(capacity.__file__).with_suffix(".json")
SWEEP_JOB = ["--threads", "1"]  # of the runs in it


def write_plots(kept: Kept, folder: Path, sweep: Path) -> list[Path]:
    """Draw all plots as PNG files.

    Args:
        kept: rows to draw.
        folder: for their plots; must exist.
        sweep: file for the plot of AUC against memory, of the repository's README.

    Returns:
        The files.
    """
    written = []
    for name, draw in PLOTS.items():
        with matplotlib.rc_context(STYLE):
            path = folder / name
            draw(kept).savefig(path, metadata={"Software": None})
        written.append(path)
    capacity.plot(sweep, *capacity.curves_of(JobRuns(SWEEP, SWEEP_JOB)))
    return [*written, sweep]
