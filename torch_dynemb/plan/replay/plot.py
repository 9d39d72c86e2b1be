"""Plot of a replay: AUC and hit rate over memory, a line for each policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_dynemb.plan.plot import figure_class, save_figure


def plot_replay(replay: Mapping[str, Any], path: Path) -> None:
    """Draw a replay.

    Args:
        replay: result of :func:`torch_dynemb.plan.replay.outcome.replayed`.
        path: of the plot; its suffix selects the format, such as ``.png`` or ``.svg``.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: matplotlib does not know the format.
        OSError: the file cannot be written.
    """
    judged = replay["label"] is not None
    figure = figure_class()(figsize=(10 if judged else 6, 4.4), layout="constrained")
    measures = [("hit_rate", "% of lookups with a row", 100.0)]
    if judged:
        measures.insert(0, ("auc", "AUC on later lines", 1.0))
    whole, *runs = replay["runs"]
    for axes, (measure, title, factor) in zip(
        figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True
    ):
        axes.axhline(factor * whole[measure], color="black", ls=":", label=whole["policy"])
        for policy in dict.fromkeys(run["policy"] for run in runs):
            points = [run for run in runs if run["policy"] == policy]
            memory = [run["memory"] / 1e6 for run in points]
            heights = [factor * run[measure] for run in points]
            errors = None
            if measure == "hit_rate" and replay["sampled_columns"]:
                errors = [2 * factor * run["hit_rate_error"] for run in points]
            axes.errorbar(memory, heights, yerr=errors, marker="o", ms=4, capsize=3, label=policy)
        axes.set(xscale="log", xlabel="MB of the tables", ylabel=title)
        axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
    save_figure(figure, path)


__all__ = ["plot_replay"]
