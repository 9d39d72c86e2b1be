"""Plots of a run against samples: loss and AUC; ids, memory, throughput and evictions."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from tutorials.dlrm.loop import Point

Curves = Mapping[str, tuple[Sequence[Point], float]]

_COLOURS = ("tab:blue", "tab:orange")
_NAMED_FEATURES = 6
_BANDS = (
    *("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown"),
    "lightgrey",
)


def plot(path: Path, curves: Curves, *, best_auc: float | None) -> None:
    """Draw a PNG.

    Args:
        path: The file to write; replaced once it is complete.
        curves: By name, points of the training and the AUC on held-out samples (at most two).
        best_auc: The best reachable AUC on held-out samples, if known.
    """
    temporary = path.with_name(path.name + ".unfinished")
    temporary.write_bytes(png(loss_and_auc(curves, best_auc=best_auc)))
    temporary.replace(path)


def png(figure: Figure) -> bytes:
    """Return a figure as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def loss_and_auc(curves: Curves, *, best_auc: float | None) -> Figure:
    """Draw loss and AUC side by side; arguments as of :func:`plot`."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")  # without pyplot: needs no display
    loss_axes, auc_axes = figure.subplots(1, 2)
    for (name, (points, auc)), colour in zip(curves.items(), _COLOURS, strict=False):
        samples = [p.samples for p in points]
        loss_axes.plot(samples, [p.loss for p in points], colour, lw=1.2, label=name)
        auc_axes.plot(samples, [p.auc for p in points], colour, lw=1.2, label=f"{name}, running")
        held_out = f"{name}, held out: {auc:.4f}"
        auc_axes.axhline(auc, color=colour, ls="--", lw=1, label=held_out)
    if best_auc is not None:
        label = f"best reachable: {best_auc:.4f}"
        auc_axes.axhline(best_auc, color="black", ls=":", lw=1, label=label)
    _finish(loss_axes, "log-loss before the update")
    _finish(auc_axes, "AUC")
    return figure


def by_feature(
    samples: Sequence[int], counts: Sequence[Sequence[int]], names: Sequence[str], title: str
) -> Figure:
    """Draw counts of features on top of each other, the largest by name and the rest as one.

    They begin with none at sample 0.

    Args:
        samples: At which they were counted, N numbers.
        counts: N times one by feature.
        names: Of the features.
        title: Of the plot.
    """
    values = np.asarray([[0] * len(names), *counts])
    order = np.argsort(-values[-1], kind="stable")
    named, rest = order[:_NAMED_FEATURES], order[_NAMED_FEATURES:]
    bands = [*values[:, named].T, values[:, rest].sum(1)]
    labels = [*(names[feature] for feature in named), f"the other {len(rest)}"]
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots()
    axes.stackplot([0, *samples], bands, labels=labels, colors=_BANDS, lw=0)
    axes.yaxis.set_major_formatter(EngFormatter())
    axes.margins(x=0.01)
    _finish(axes, title)
    beside = {"loc": "upper left", "bbox_to_anchor": (1, 1), "reverse": True}
    axes.legend(fontsize="small", **beside)
    return figure


def over_samples(
    samples: Sequence[int], curves: Mapping[str, Sequence[float]], unit: str
) -> Figure:
    """Draw curves from zero on.

    Args:
        samples: Where the curves' values are, N numbers.
        curves: N values, by name.
        unit: Of the values.
    """
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots()
    for (name, values), colour in zip(curves.items(), _COLOURS, strict=False):
        axes.plot(samples, values, colour, lw=1.2, label=name)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter())
    _finish(axes, unit)
    return figure


def _finish(axes: Axes, title: str) -> None:
    for line in axes.lines:
        if len(line.get_xdata()) == 1:  # a line of one point is not seen
            line.set_marker("o")
    axes.set_title(title)
    axes.set_xlabel("training samples")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
