"""AUC against the memory of the tables: ``python -m tutorials.dlrm.capacity --help``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullFormatter

_DESCRIPTION = """\
Run the training job with tables of unlimited size, then with capacities that are shares of the ids
these hold at the end: once with eviction of the least frequent ids and with hashed tables of the
same bytes, once with an admission rule, too. Options that are not listed here go to the job, such
as --seed or --samples. What FOLDER/capacity.json holds of the same job is not run again.
"""
_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
_STYLES = {
    "dynamic tables, LFU": ("tab:blue", "o-"),
    "dynamic tables, LFU and admission": ("tab:green", "s-"),
    "hashing trick": ("tab:orange", "^--"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        arguments: Of the command line; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tutorials.dlrm.capacity", description=_DESCRIPTION, allow_abbrev=False
    )
    add = parser.add_argument
    add("--admission", default="count:2", metavar="RULE", help="of the job (default: %(default)s)")
    add("--shares", type=float, nargs="+", default=_SHARES, help="default: 0.01 0.03 0.1 0.3 1")
    add("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    add("--runs", type=Path, default=Path("runs/capacity"), help="gets what the runs write")
    add("--out", type=Path, default=Path(__file__).parent, metavar="FOLDER", help="gets the result")
    given, job = parser.parse_known_args(arguments)
    path = given.out / "capacity.json"
    results: dict[str, Any] = {"job": job, "runs": {}}
    if path.exists() and (before := json.loads(path.read_text()))["job"] == job:
        results = before

    def run_all(options: Iterable[list[str]]) -> None:
        missing = [o for o in options if " ".join(o) not in results["runs"]]
        with ThreadPoolExecutor(given.jobs) as pool:
            futures = {pool.submit(_run, [*o, *job], given.runs): " ".join(o) for o in missing}
            for future in as_completed(futures):
                results["runs"][futures[future]] = future.result()
                path.write_text(json.dumps(results, indent=1) + "\n")

    unlimited = ["--no-baseline"]
    run_all([unlimited])
    ids = results["runs"]["--no-baseline"]["ids"]
    capacities = [["--capacity", str(max(26, round(share * ids)))] for share in given.shares]
    admitted = [[*c, "--admission", given.admission, "--no-baseline"] for c in capacities]
    run_all([*capacities, *admitted])
    chosen = [results["runs"][" ".join(c)] for c in capacities]
    curves = {
        "dynamic tables, LFU": [(r["table_bytes"], r["auc"]) for r in chosen],
        "dynamic tables, LFU and admission": [
            (r["table_bytes"], r["auc"]) for r in (results["runs"][" ".join(c)] for c in admitted)
        ],
        "hashing trick": [(r["table_bytes"], r["baseline_auc"]) for r in chosen],
    }
    plot(given.out / "capacity.png", curves, results["runs"]["--no-baseline"], given.admission)


def plot(
    path: Path,
    curves: dict[str, list[tuple[int, float]]],
    unlimited: dict[str, Any],
    admission: str,
) -> None:
    """Draw a PNG.

    Args:
        path: The file to write.
        curves: By name, bytes and AUC.
        unlimited: The result of the job without a capacity.
        admission: The rule, for the legend.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")  # without pyplot: needs no display
    axes = figure.subplots()
    axes.axhline(unlimited["auc"], color="black", ls=":", lw=1, label="dynamic tables, no limit")
    for name, points in curves.items():
        colour, style = _STYLES[name]
        label = name.replace("admission", f"--admission {admission}")
        x, y = zip(*((size / 1e6, auc) for size, auc in points), strict=True)
        axes.plot(x, y, style, color=colour, ms=5, lw=1.4, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(LogFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tables with index, scores, counts and optimizer state, MB")
    axes.set_ylabel("AUC on later samples")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", loc="lower right")
    figure.savefig(path, dpi=110)


def _run(options: list[str], folder: Path) -> dict[str, Any]:
    """Run the job; return what it prints at its end."""
    out = folder / "-".join(options).replace("/", "_").replace(":", "_").strip("-")
    print("train", *options, file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", "tutorials.dlrm.train", *options, "--out", out],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"error: train {' '.join(options)}: {done.stderr.splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print("train", *options, json.dumps(result), file=sys.stderr)
    return result


if __name__ == "__main__":
    main()
