"""Parts of the report: plots, images, tables, and facts of the machine."""

from __future__ import annotations

import base64
import io
import json
import os
import platform
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

import torch_dynemb as td
from tutorials.dlrm.data import FEATURE_NAMES
from tutorials.dlrm.loop import Point

Curves = Mapping[str, tuple[Sequence[Point], float]]
"""By name of a model, the points of its training and its AUC on held-out samples."""

_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")


def loss_and_auc(curves: Curves, best_auc: float | None) -> Figure:
    """Draw loss and AUC side by side."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")  # without pyplot: needs no display
    loss_axes, auc_axes = figure.subplots(1, 2)
    for (name, (points, auc)), colour in zip(curves.items(), _COLOURS, strict=False):
        samples = [p.samples for p in points]
        loss_axes.plot(samples, [p.loss for p in points], colour, lw=1.2, label=name)
        auc_axes.plot(samples, [p.auc for p in points], colour, lw=1.2, label=f"{name}, running")
        auc_axes.axhline(auc, color=colour, ls="--", lw=1, label=f"{name}, held out: {auc:.4f}")
    if best_auc is not None:
        label = f"best reachable: {best_auc:.4f}"
        auc_axes.axhline(best_auc, color="black", ls=":", lw=1, label=label)
    _finish(loss_axes, "log-loss before the update")
    _finish(auc_axes, "AUC")
    return figure


def by_feature(samples: Sequence[int], counts: Sequence[Sequence[int]], title: str) -> Figure:
    """Draw counts of features on top of each other, the largest by name and the rest as one."""
    values = np.asarray([[0] * len(FEATURE_NAMES), *counts])
    order = np.argsort(-values[-1], kind="stable")
    named, rest = order[: len(_COLOURS)], order[len(_COLOURS) :]
    bands = [*values[:, named].T, values[:, rest].sum(1)]
    labels = [*(FEATURE_NAMES[feature] for feature in named), f"the other {len(rest)}"]
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots()
    axes.stackplot([0, *samples], bands, labels=labels, colors=(*_COLOURS, "lightgrey"), lw=0)
    axes.yaxis.set_major_formatter(EngFormatter())
    axes.margins(x=0.01)
    _finish(axes, title)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
    return figure


def lines(samples: Sequence[int], curves: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw curves from zero on."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots()
    for (name, values), colour in zip(curves.items(), _COLOURS, strict=False):
        axes.plot(samples, values, colour, lw=1.2, label=name)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter())
    _finish(axes, title)
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


def png(figure: Figure) -> bytes:
    """Return the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def image(content: bytes, description: str) -> str:
    """Return the element of a PNG that is part of the page."""
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return f'<p><img alt="{escape(description)}" src="{source}"></p>'


def table(facts: Mapping[str, object]) -> str:
    """Return a table of names and values."""
    rows = "\n".join(
        f"<tr><th>{escape(name)}</th><td>{escape(_shown(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<table>\n{rows}\n</table>"


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)


def environment(device: object) -> dict[str, str]:
    """Return facts of the machine, and versions."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    processor = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": processor[0] if processor else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.1f} GiB",
        "instruction set of torch": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        **({"GPU": torch.cuda.get_device_name()} if device == "cuda" else {}),
        "torch_dynemb": td.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
    }


def replace(path: Path, content: bytes) -> None:
    """Write a file that appears once it is complete."""
    temporary = path.with_name(path.name + ".unfinished")
    temporary.write_bytes(content)
    temporary.replace(path)
