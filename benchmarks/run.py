"""Runs the benchmarks, each in a process of its own, keeps what they measured, and compares it.

Example:
    python benchmarks/run.py --quick index train_step
    python benchmarks/run.py --save
    python benchmarks/run.py feature_ops --compare results/OLD.json
    python benchmarks/run.py --compare results/OLD.json results/NEW.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

from common import machine
from common.command import is_selected, parser
from common.regressions import (
    Results,
    ResultsError,
    compare_results,
    read_results,
    report_of,
    results_of,
)
from common.report import Row, table, write_results
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
BENCHMARKS = (
    "index",
    "train_step",
    "growth",
    "scale",
    "many_tables",
    "overhead",
    "dlrm",
    "two_ranks",
    "lifecycle",
    "assign",
    "optimizers",
    "retrieval",
    "torchrec_step",
    "replica_sync",
    "scale_out",
    "feature_ops",
    "ragged",
    "dcp_load",
    "live_resharding",
    "checkpoint",
    "delta",
    "freshness",
    "tiers",
    "live_serving",
    "serving",
    "serving_load",
    "remote_rows",
    "file_rows",
    "shared_tables",
    "quantized_rows",
    "ops",
)


def run(name: str, arguments: list[str], *, as_json: bool) -> list[Row]:
    """Run one benchmark.

    Args:
        name: one of :data:`BENCHMARKS`.
        arguments: its command line, ``--json`` apart.
        as_json: print its lines as they come.

    Returns:
        Its rows.

    Raises:
        SystemExit: the benchmark failed; it has said why on stderr.
    """
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *arguments]
    rows: list[Row] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            rows.append(json.loads(line))
            if as_json:
                print(line, end="", flush=True)
    if process.returncode != 0:
        raise SystemExit(f"benchmark {name} ended with status {process.returncode}")
    return rows


def save(rows: list[Row], selected: list[str], note: str = "") -> Path:
    """Write rows and the machine's description to ``results/<machine>-<date>.json``.

    If only some benchmarks have run, their names follow the date: the rows of a full run stay.

    Args:
        rows: of all benchmarks that have run.
        selected: their names; empty for all.
        note: restriction of the result, such as "one noisy run".

    Returns:
        The file.
    """
    parts = [machine.cpu_slug(), datetime.date.today().isoformat(), *selected]
    path = HERE / "results" / f"{'-'.join(parts)}.json"
    path.parent.mkdir(exist_ok=True)
    described = machine.description("cpu") | ({"note": note} if note else {})
    write_results(path, described, rows)
    return path


def results_path(text: str) -> Path:
    """Return the file of results that a command line means: from here, or from this folder."""
    path = Path(text)
    return HERE / path if not path.exists() and (HERE / path).exists() else path


def selection(results: Results, names: list[str], only: list[str]) -> Results:
    """Return the rows of the benchmarks ``names`` that ``--only`` asks for."""
    rows = {
        key: row
        for key, row in results.rows.items()
        if key[0] in names and is_selected(only, key[1], key[2])
    }
    return Results(results.name, results.machine, rows)


def print_comparison(old: Results, new: Results, *, as_json: bool) -> int:
    """Print what got slower, and what cannot be compared.

    Args:
        old: the earlier result.
        new: the later one.
        as_json: stdout has lines of JSON: print to stderr.

    Returns:
        Status of the process: 1 where something got slower, 2 where nothing can be compared.
    """
    found = compare_results(old, new)
    print(report_of(found, old, new), file=sys.stderr if as_json else sys.stdout)
    if not found.compared:
        print("\nNo row can be compared: that says nothing about speed.", file=sys.stderr)
        return 2
    return 1 if found.slower else 0


def run_all(names: list[str], passed: list[str], *, as_json: bool) -> list[Row]:
    """Return rows of benchmarks, run one after another with the same command line."""
    rows: list[Row] = []
    bar = tqdm(names, unit="benchmark", file=sys.stderr, position=2)
    for name in bar:
        bar.set_description(name)
        rows += run(name, passed, as_json=as_json)
    return rows


def command_line() -> argparse.ArgumentParser:
    """Return the options of all benchmarks, and those of this program."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "benchmarks",
        nargs="*",
        metavar="NAME",
        help=f"benchmarks to run: {', '.join(BENCHMARKS)} (default: all; with --compare, those "
        "that OLD.json has); after --compare OLD.json also a NEW.json, then nothing is run",
    )
    arguments.add_argument(
        "--save", action="store_true", help="keep the rows in benchmarks/results"
    )
    arguments.add_argument(
        "--note",
        metavar="TEXT",
        default="",
        help='with --save: what restricts the result, such as "one noisy run"; README.md shows it',
    )
    arguments.add_argument(
        "--compare",
        metavar="OLD.json",
        help="print what got slower by more than 10 %% since a kept result, and exit with 1 if "
        "anything did; with NEW.json behind it, compare the two files",
    )
    return arguments


def main() -> None:
    arguments = command_line()
    options = arguments.parse_args()
    files = [word for word in options.benchmarks if word.endswith(".json")]
    names = [word for word in options.benchmarks if not word.endswith(".json")]
    if unknown := [name for name in names if name not in BENCHMARKS]:
        arguments.error(f"NAME={unknown[0]!r}: expected one of {', '.join(BENCHMARKS)}")
    if len(files) > (options.compare is not None):
        arguments.error(f"{files[-1]}: files of results are given as --compare OLD.json [NEW.json]")
    if options.note and not options.save:
        arguments.error("--note goes with --save: give --save, too")
    if options.save and files:
        arguments.error("--save keeps what was run, and two files are compared without running")
    for option in ("save", "compare"):
        if options.quick and getattr(options, option):
            arguments.error(
                f"--{option} is about results, and --quick gives none: leave one of them out"
            )
    old = new = None
    try:
        if options.compare:
            old = read_results(results_path(options.compare))
        if files:
            new = read_results(results_path(files[0]))
    except ResultsError as error:
        arguments.error(f"--compare: {error}")
    if old is not None and not names:
        names = sorted({key[0] for results in (old, new) if results for key in results.rows})
        if new is None and (unknown := [name for name in names if name not in BENCHMARKS]):
            arguments.error(
                f"--compare: {old.name} has rows of {unknown[0]!r}, which this program does not "
                "run: give the NAMEs of benchmarks, or a NEW.json"
            )
    names = names or list(BENCHMARKS)
    if new is None:
        passed = ["--rounds", str(options.rounds)]
        passed += ["--quick"] if options.quick else []
        passed += [word for text in options.only for word in ("--only", text)]
        rows = run_all(names, passed, as_json=options.json)
        if not options.json:
            print(table(rows))
        if options.save:
            written = save(rows, options.benchmarks, options.note).relative_to(HERE.parent)
            print(f"written: {written}", file=sys.stderr)
        new = results_of("this run", machine.description("cpu") if old else {}, rows)
    if old is not None:
        old, new = (selection(results, names, options.only) for results in (old, new))
        raise SystemExit(print_comparison(old, new, as_json=options.json))


if __name__ == "__main__":
    main()
