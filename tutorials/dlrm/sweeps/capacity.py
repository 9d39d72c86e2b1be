"""AUC against the memory of the tables: ``python -m tutorials.dlrm.sweeps.capacity --help``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from tutorials.dlrm.data import CATEGORY_COUNT
from tutorials.dlrm.sweeps.job_runs import JobRuns

_DESCRIPTION = """\
Run the training job with tables of unlimited size, then with capacities that are shares of the ids
these hold at the end: once with eviction of the least frequent ids and with hashed tables of the
same bytes, and once for each admission rule. Options that are not listed here go to the job, such
as --seed or --samples. What FOLDER/capacity.json holds of the same job is not run again.
"""
_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
_RULES = ("count:2", "chance:0.3")
_COLOURS = ("tab:orange", "tab:blue", "tab:green", "tab:purple", "tab:red")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        arguments: Of the command line; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tutorials.dlrm.sweeps.capacity",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--rules",
        nargs="+",
        default=_RULES,
        metavar="RULE",
        help="for --admission of the job (default: count:2 chance:0.3)",
    )
    add("--shares", type=float, nargs="+", default=_SHARES, help="default: 0.01 0.03 0.1 0.3 1")
    add("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    add("--out", type=Path, default=Path(__file__).parent, metavar="FOLDER", help="gets the result")
    given, job = parser.parse_known_args(arguments)
    runs = JobRuns(given.out / "capacity.json", job)
    unlimited = ["--no-baseline"]
    runs.run([unlimited])
    reference = runs[unlimited]
    limits = [max(CATEGORY_COUNT, round(share * reference["ids"])) for share in given.shares]
    evicting = [["--capacity", str(limit)] for limit in limits]
    admitting = {
        rule: [[*options, "--admission", rule, "--no-baseline"] for options in evicting]
        for rule in given.rules
    }
    limited = [*evicting, *(options for rule in given.rules for options in admitting[rule])]
    runs.run(limited, at_once=given.jobs)

    def curve(chosen: list[list[str]], auc: str) -> list[tuple[int, float]]:
        return [(runs[options]["table_bytes"], runs[options][auc]) for options in chosen]

    curves = {
        "hashing trick": curve(evicting, "baseline_auc"),
        "dynamic tables, LFU": curve(evicting, "auc"),
    } | {
        f"dynamic tables, LFU, --admission {rule}": curve(options, "auc")
        for rule, options in admitting.items()
    }
    plot(given.out / "capacity.png", curves, unlimited_auc=reference["auc"])


def plot(
    path: Path, curves: Mapping[str, Sequence[tuple[int, float]]], *, unlimited_auc: float
) -> None:
    """Draw a PNG.

    Args:
        path: The file to write.
        curves: By name, bytes and AUC.
        unlimited_auc: Of the job without a capacity.
    """
    figure = Figure(figsize=(7, 4.8), layout="constrained")  # without pyplot: needs no display
    axes = figure.subplots()
    axes.axhline(unlimited_auc, color="black", ls=":", lw=1, label="dynamic tables, no limit")
    for (name, points), colour in zip(curves.items(), cycle(_COLOURS), strict=False):
        megabytes = [size / 1e6 for size, _ in points]
        axes.plot(megabytes, [auc for _, auc in points], "o-", color=colour, ms=4, label=name)
    axes.set_xscale("log")
    for axis_formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis_formatter(LogFormatter(minor_thresholds=(2, 1)))
    axes.set_xlabel("MB of the tables: rows, optimizer state, index, scores, counts")
    axes.set_ylabel("AUC on later samples")
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
