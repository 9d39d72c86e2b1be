"""The picture of a comparison: NDCG@10 and HR@10 by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tutorials.dlrm.sweeps.style import BLUE, GREEN, GREY, ORANGE, PURPLE, STYLE, WIDTH
from tutorials.sequence.sasrec.train import Quality

_COLOURS = (GREY, BLUE, GREEN, ORANGE, PURPLE)


def plot(path: Path, curves: Mapping[str, list[Quality]], best: Quality) -> None:
    """Draw a PNG.

    Args:
        path: of the file.
        curves: quality after each epoch, by the name of the loss.
        best: of the planted probabilities.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")  # needs no display
        axes = figure.subplots(1, 2)
        for (name, points), colour in zip(curves.items(), _COLOURS, strict=False):
            epochs = range(1, len(points) + 1)
            style = "--" if colour == GREY else "-"
            for of, values in zip(axes, zip(*points, strict=True), strict=True):
                of.plot(epochs, values, style, color=colour, lw=1.6, label=name)
        for of, reached, title in zip(axes, best, ("NDCG@10", "HR@10"), strict=True):
            of.axhline(reached, color="black", ls=":", lw=1, label="planted probabilities")
            of.set_title(f"{title} of the next item, by time")
            of.set_xlabel("epoch")
            of.xaxis.set_major_locator(MaxNLocator(integer=True))
            of.set_ylim(bottom=0)
        axes[0].legend(fontsize="small", loc="lower right")
        figure.savefig(path, format="png")
