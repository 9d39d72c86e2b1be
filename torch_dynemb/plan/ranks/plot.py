"""Plot of the model of ranks: time of a step and bytes over ranks, a line for each sharding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_dynemb.plan.plot import figure_class, save_figure
from torch_dynemb.plan.ranks.report import name_of

_MARKERS = "oos^Dv<>"  # lines of some types coincide


def plot_ranks(model: Mapping[str, Any], path: Path) -> None:
    """Draw the model of ranks.

    Args:
        model: result of :func:`torch_dynemb.plan.ranks.outcome.modelled`.
        path: of the plot; its suffix selects the format, such as ``.png`` or ``.svg``.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: matplotlib does not know the format.
        OSError: the file cannot be written.
    """
    figure = figure_class()(figsize=(13, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    names = dict.fromkeys(name_of(case) for case in model["cases"])
    for name, marker in zip(names, _MARKERS, strict=True):
        cases = [case for case in model["cases"] if name_of(case) == name]
        ranks = [case["ranks"] for case in cases]
        style: dict[str, Any] = {"marker": marker, "ms": 5, "label": name}
        style |= {"ls": "--" if cases[0]["dedup"] else "-", "mfc": "none"}
        panels[0].plot(ranks, [1e3 * case["seconds"]["step"] for case in cases], **style)
        panels[1].plot(ranks, [case["sent"]["total"] / 1e6 for case in cases], **style)
        panels[2].plot(ranks, [case["fullest"]["lookups"] for case in cases], **style)
    titles = (
        "ms of a step",
        "MB that a rank sends in a step",
        "lookups of the fullest rank / mean",
    )
    for axes, title in zip(panels, titles, strict=True):
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=title)
        axes.set_xticks(model["ranks"], [str(ranks) for ranks in model["ranks"]])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    save_figure(figure, path)


__all__ = ["plot_ranks"]
