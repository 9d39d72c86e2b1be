"""Runs the benchmarks, each in a process of its own, and keeps what they measured.

Example:
    python benchmarks/run.py --quick index train_step
    python benchmarks/run.py --save
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

from common import machine
from common.command import parser
from common.report import Row, table, write_results
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
BENCHMARKS = (
    "index",
    "train_step",
    "growth",
    "overhead",
    "lifecycle",
    "assign",
    "optimizers",
    "torchrec_step",
    "feature_ops",
    "ragged",
    "dcp_load",
    "checkpoint",
    "delta",
    "tiers",
    "live_serving",
    "serving",
    "quantized_rows",
)


def run(name: str, arguments: list[str], *, as_json: bool) -> list[Row]:
    """Runs one benchmark.

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


def save(rows: list[Row], selected: list[str]) -> Path:
    """Writes rows and the machine's description to ``results/<machine>-<date>.json``.

    Where only some benchmarks have run, their names follow the date: the rows of a full run stay.
    """
    parts = [machine.cpu_slug(), datetime.date.today().isoformat(), *selected]
    path = HERE / "results" / f"{'-'.join(parts)}.json"
    path.parent.mkdir(exist_ok=True)
    write_results(path, machine.description("cpu"), rows)
    return path


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "benchmarks",
        nargs="*",
        metavar="NAME",
        help=f"benchmarks to run: {', '.join(BENCHMARKS)} (default: all)",
    )
    arguments.add_argument(
        "--save", action="store_true", help="keep the rows in benchmarks/results"
    )
    options = arguments.parse_args()
    if unknown := [name for name in options.benchmarks if name not in BENCHMARKS]:
        arguments.error(f"NAME={unknown[0]!r}: expected one of {', '.join(BENCHMARKS)}")
    if options.save and options.quick:
        arguments.error("--save keeps results, and --quick gives none: leave one of them out")
    passed = ["--rounds", str(options.rounds)]
    passed += ["--quick"] if options.quick else []
    passed += [word for text in options.only for word in ("--only", text)]
    rows: list[Row] = []
    bar = tqdm(options.benchmarks or BENCHMARKS, unit="benchmark", file=sys.stderr, position=2)
    for name in bar:
        bar.set_description(name)
        rows += run(name, passed, as_json=options.json)
    if not options.json:
        print(table(rows))
    if options.save:
        print(
            f"written: {save(rows, options.benchmarks).relative_to(HERE.parent)}", file=sys.stderr
        )


if __name__ == "__main__":
    main()
