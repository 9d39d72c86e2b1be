"""AUC against the memory of the tables: ``python -m tutorials.dlrm.sweeps.capacity --help``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from tutorials.dlrm.data import CATEGORY_COUNT
from tutorials.dlrm.sweeps.job_runs import JobRuns
from tutorials.dlrm.sweeps.style import BLUE, GREEN, ORANGE, PURPLE, RED, STYLE, WIDTH

_DESCRIPTION = """\
Run the training job with tables of unlimited size, then with capacities that are shares of the ids
these hold at the end: once with eviction of the least frequent ids and with hashed tables of the
same bytes, and once for each admission rule. Options that are not listed here go to the job, such
as --seed or --samples. What FOLDER/capacity.json holds of the same job is not run again.
"""
_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
_UNLIMITED = ["--no-baseline"]
_RULES = ("count:2", "chance:0.3")
_COLOURS = (ORANGE, BLUE, GREEN, PURPLE, RED)
Curves = dict[str, list[tuple[int, float]]]  # by name, bytes and AUC


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
    runs.run([_UNLIMITED])
    evicting, admitting = _limited(runs, given.shares, given.rules)
    runs.run([*evicting, *(o for of in admitting.values() for o in of)], at_once=given.jobs)
    plot(given.out / "capacity.png", *curves_of(runs, given.shares, given.rules))


def _limited(
    runs: JobRuns, shares: Sequence[float], rules: Sequence[str]
) -> tuple[list[list[str]], dict[str, list[list[str]]]]:
    """Return options of the runs with a capacity, and of those with a rule by the rule."""
    ids = runs[_UNLIMITED]["ids"]
    limits = [max(CATEGORY_COUNT, round(share * ids)) for share in shares]
    evicting = [["--capacity", str(limit)] for limit in limits]
    admitting = {
        rule: [[*options, "--admission", rule, "--no-baseline"] for options in evicting]
        for rule in rules
    }
    return evicting, admitting


def curves_of(
    runs: JobRuns, shares: Sequence[float] = _SHARES, rules: Sequence[str] = _RULES
) -> tuple[Curves, float]:
    """Return the curves of runs that are done, and the AUC without a capacity.

    Args:
        runs: Of the job.
        shares: Capacities, as shares of the ids.
        rules: For ``--admission``.

    Raises:
        KeyError: A run is missing.
    """
    evicting, admitting = _limited(runs, shares, rules)

    def curve(chosen: list[list[str]], auc: str) -> list[tuple[int, float]]:
        return [(runs[options]["table_bytes"], runs[options][auc]) for options in chosen]

    curves = {
        "hashing trick": curve(evicting, "baseline_auc"),
        "dynamic tables, LFU": curve(evicting, "auc"),
    } | {
        f"dynamic tables, LFU, --admission {rule}": curve(options, "auc")
        for rule, options in admitting.items()
    }
    return curves, runs[_UNLIMITED]["auc"]


def plot(
    path: Path, curves: Mapping[str, Sequence[tuple[int, float]]], unlimited_auc: float
) -> None:
    """Draw a PNG.

    Args:
        path: The file to write.
        curves: By name, bytes and AUC.
        unlimited_auc: Of the job without a capacity.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")  # needs no display
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
        figure.legend(loc="outside lower center", ncols=2)
        figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    main()
