"""The plot of a run: loss and AUC against samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tutorials.dlrm.loop import Point

_COLOURS = ("tab:blue", "tab:orange")


def plot(
    path: Path,
    curves: Mapping[str, tuple[Sequence[Point], float]],
    *,
    best_auc: float | None,
) -> None:
    """Draw a PNG.

    Args:
        path: The file to write; replaced once it is complete.
        curves: By name, points of the training and the AUC on held-out samples (at most two).
        best_auc: The best reachable AUC on held-out samples, if known.
    """
    # here, since it takes half a second, and ranks that plot nothing do without
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

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
    for axes, title in ((loss_axes, "log-loss before the update"), (auc_axes, "AUC")):
        axes.set_title(title)
        axes.set_xlabel("training samples")
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    temporary = path.with_name(path.name + ".unfinished")
    figure.savefig(temporary, format="png", dpi=110)
    temporary.replace(path)
