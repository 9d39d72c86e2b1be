"""Time of a step by size of the cache: ``python -m tutorials.dlrm.sweeps.cache_size --help``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from tutorials.dlrm.options import at_least
from tutorials.dlrm.sweeps.job_runs import JobRuns

_DESCRIPTION = """\
Run the training job with all rows in memory, then with rows in files and caches of several sizes,
and draw the time of a step. Options that are not listed here go to the job, such as --samples or
--zipf. What FOLDER/cache_size.json holds of the same job is not run again.
"""
_SHARES = (0.05, 0.1, 0.25, 0.5, 1.0)
_BATCH = 2048


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        arguments: Of the command line; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tutorials.dlrm.sweeps.cache_size",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--shares", type=float, nargs="+", default=_SHARES, help="default: 0.05 0.1 0.25 0.5 1")
    add("--rounds", type=at_least(1), default=3, help="of all runs; medians count (default: 3)")
    add("--out", type=Path, default=Path(__file__).parent, metavar="FOLDER", help="gets the result")
    given, job = parser.parse_known_args(arguments)
    job += ["--no-baseline", "--batch-size", str(_BATCH)]
    runs = JobRuns(given.out / "cache_size.json", job)
    in_memory: list[str] = []
    in_files = {
        share: ["--storage", "ssd", "--cache", f"{100 * share:g}%"] for share in given.shares
    }
    runs.run([in_memory, *in_files.values()], rounds=given.rounds)

    def step_ms(options: list[str]) -> float:
        rates = [float(runs.of(options, n)["samples_per_s"]) for n in range(given.rounds)]
        return _BATCH / median(rates) * 1e3

    points = []
    for share, options in in_files.items():
        if runs[options]["auc"] != runs[in_memory]["auc"]:
            raise SystemExit(f"error: the AUC with {' '.join(options)} is not that in memory")
        points.append((share, step_ms(options), _fetched(runs[options]["storage"])))
    plot(given.out / "cache_size.png", points, step_ms(in_memory))


def _fetched(storage: dict[str, float]) -> float:
    """Return part of the lookups' ids for which a row came from the files, or was new."""
    came = storage["misses"] + storage["prefetched"]
    return came / (storage["hits"] + storage["misses"])


def plot(path: Path, points: Sequence[tuple[float, float, float]], in_memory_ms: float) -> None:
    """Draw a PNG.

    Args:
        path: The file to write.
        points: Size of the cache as a part of the rows, ms of a step, and share of the ids with a
            row from the files or a new one.
        in_memory_ms: Of a step with all rows in memory.
    """
    figure = Figure(figsize=(7, 4.8), layout="constrained")  # without pyplot: needs no display
    axes = figure.subplots()
    shares = [share for share, _, _ in points]
    steps = [ms for _, ms, _ in points]
    axes.plot(shares, steps, "o-", color="tab:blue", label="rows in files")
    axes.axhline(in_memory_ms, color="black", ls=":", lw=1, label="all rows in memory")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cache, as a part of the rows")
    axes.set_ylabel("ms of a step, reading of the samples included")
    right = axes.twinx()
    came = [part for _, _, part in points]
    right.plot(shares, came, "s--", color="tab:orange", ms=4, label="from files, or new")
    right.set_ylim(bottom=0)
    right.set_ylabel("of the ids of a step: rows from files, or new")
    right.yaxis.set_major_formatter(PercentFormatter(1))
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
