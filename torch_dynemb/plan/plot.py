"""Plot of a plan: growth of ids, and the most frequent ids' share of lookups."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plot(plan: Mapping[str, Any], path: Path) -> None:
    """Draw a plan.

    Args:
        plan: result of :func:`torch_dynemb.plan.outcome.outcome`.
        path: of the plot; its suffix selects the format, such as ``.png`` or ``.svg``.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: matplotlib does not know the format.
        OSError: the file cannot be written.
    """
    figure = figure_class()(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    growth = plan["growth"]
    lines = [at["lines"] for at in growth]
    left.fill_between(
        lines,
        [at["low"] for at in growth],
        [at["high"] for at in growth],
        alpha=0.3,
        label="from, to",
    )
    left.plot(lines, [at["expected"] for at in growth], marker="o", label="expected")
    left.set(xscale="log", yscale="log", xlabel="lines", ylabel="distinct ids")
    left.legend()
    right.plot(
        [at["ids"] for at in plan["coverage"]],
        [100 * at["share"] for at in plan["coverage"]],
        marker="o",
    )
    right.set(xscale="log", xlabel="most frequent ids", ylabel="% of the sample's lookups")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save_figure(figure, path)


def figure_class() -> Any:
    """Return the class of figures of matplotlib.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError(
            "--plot draws with matplotlib: install it (pip install matplotlib), or leave the "
            "option out"
        ) from error


def check_plot(path: Path) -> None:
    """Raise the errors of a plot before there is one.

    Raises:
        ImportError, ValueError, OSError: as :func:`plot`.
    """
    known = figure_class()().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(
            f"--plot is {path}, and its format cannot be drawn: use a name that ends in .png, .svg "
            "or .pdf"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--plot is {path}: make the folder {path.parent} first")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure.

    Raises:
        ValueError: matplotlib does not know the format.
        OSError: the file cannot be written.
    """
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ValueError(
            f"--plot is {path}, and its format cannot be drawn ({error}): use a name that ends in "
            ".png, .svg or .pdf"
        ) from error


__all__ = ["check_plot", "figure_class", "plot", "save_figure"]
