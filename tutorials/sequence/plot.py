"""The picture of a run: loss and AUC against steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from tutorials.sequence.train import Trained

_COLOURS = ("tab:blue", "tab:orange")


def plot(path: Path, models: Mapping[str, Trained]) -> None:
    """Draw a PNG.

    Args:
        path: The file to write; replaced once it is complete.
        models: By name, at most two.
    """
    figure = Figure(figsize=(12, 4.5), layout="constrained")  # without pyplot: needs no display
    loss_axes, auc_axes = figure.subplots(1, 2)
    for (name, trained), colour in zip(models.items(), _COLOURS, strict=False):
        steps = [point.step for point in trained.points]
        loss_axes.plot(steps, [p.loss for p in trained.points], colour, lw=1.2, label=name)
        auc_axes.plot(steps, [p.auc for p in trained.points], colour, lw=1.2, label=name)
        held_out = f"{name}, held out: {trained.auc:.4f}"
        auc_axes.axhline(trained.auc, color=colour, ls="--", lw=1, label=held_out)
    best_auc = next(iter(models.values())).best_auc
    label = f"best reachable, held out: {best_auc:.4f}"
    auc_axes.axhline(best_auc, color="black", ls=":", lw=1, label=label)
    for axes, title in ((loss_axes, "log-loss before the update"), (auc_axes, "running AUC")):
        axes.set_title(title)
        axes.set_xlabel("training steps")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    temporary = path.with_name(path.name + ".unfinished")
    figure.savefig(temporary, format="png", dpi=110)
    temporary.replace(path)
