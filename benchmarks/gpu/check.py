"""Program that checks and times the CUDA kernels on this machine's GPU, in order of worth.

No network and no environment of its own: the python3 that runs this must have torch with CUDA,
pytest and matplotlib. Parts, each within --seconds; what does not fit is cut from the end::

  first  every op on small shapes against the CPU, the tests of the device, memcheck with Adam, the
         published case eager and replayed, Nsight Compute on the hot kernels
  suite  the test suite on the GPU: four processes, then alone what takes all memory
  rest   ceilings of the GPU, waits of the host, the published case and all widths, rows in host
         memory, racecheck, initcheck; JSON and a plot

torch_dynemb/_C.abi3.so is taken if it works on this GPU, else built for it alone, by nvcc. The
directory in the environment variable OUT (or build/gpu-check) gets gpu-check-<part>.json, what
became of each step, and gpu-check-<part>.tar.gz, all logs and results; both also while it runs.
Results name the commit; in a copy without git, set the environment variable COMMIT.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))  # also where this is started from elsewhere

from benchmarks.common import report  # noqa: E402
from benchmarks.gpu import library  # noqa: E402
from benchmarks.gpu.nvidia_tools import (  # noqa: E402
    find_tool,
    ncu_command,
    ncu_table_verdict,
    ncu_verdict,
    sanitizer_command,
    sanitizer_verdict,
)
from benchmarks.gpu.part import (  # noqa: E402
    NOT_RUN,
    PASSED,
    Outcome,
    Part,
    environment,
    last_line,
    say,
)

SECONDS = 570.0  # ten minutes, less what it takes to begin and to end
WORK = ROOT / "build" / "gpu-check"
PYTEST = [
    *(sys.executable, "-m", "pytest", "tests", "--device", "cuda", "-v", "--durations=20"),
    *("--timeout", "300", "--continue-on-collection-errors"),
]
PROCESSES = 4
ALONE_SECONDS = 100.0
STAGES = {"gpu_published": "published", "gpu_ops": "dims"}  # by benchmark in a row
RACECHECK, INITCHECK = ("adam", "rowwise_adagrad"), ("adam",)


class CheckError(Exception):
    """There is nothing to check here, or nothing to check it with."""


def describe_machine() -> dict[str, Any]:
    """Commit, device and versions, asked in another process, so that this one holds no GPU.

    Raises:
        CheckError: no torch, no CUDA in it, no GPU, or no commit.
    """
    reply = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.device"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    if reply.returncode != 0:
        raise CheckError(
            f"{last_line(reply.stderr)}. {sys.executable} is asked; GPU_PYTHON names another"
        )
    found: dict[str, Any] = json.loads(reply.stdout.splitlines()[-1])
    return found


def find_toolkit() -> Path | None:
    """Return the CUDA toolkit that setup.py would use, from a process that imports torch.

    Raises:
        CheckError: there is one that does not work.
    """
    program = "import os, setup; print(setup.find_cuda_root(os.environ) or '')"
    reply = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment({"DYNEMB_CUDA": "1"}),
        check=False,
    )
    if reply.returncode != 0:
        raise CheckError(last_line(reply.stderr))
    found = last_line(reply.stdout)
    return Path(found) if found else None


def has_module(name: str) -> bool:
    """Return whether this python can import a module."""
    from importlib.util import find_spec

    return find_spec(name) is not None


def module(name: str, *arguments: object) -> list[str]:
    """Return the command that runs a program of this package."""
    return [sys.executable, "-m", f"benchmarks.gpu.{name}", *map(str, arguments)]


def read_json(path: Path) -> dict[str, Any]:
    """Return a file of a step; empty if the step has not written it."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


# -- steps --------------------------------------------------------------------------------------


def compare_small_shapes(part: Part) -> None:
    """Compare every op on small shapes with the CPU; note the kernels that it launched."""
    file = part.work / "small-shapes.json"
    part.run("small shapes", module("small_shapes", "--kernels", file), seconds=150)
    by_optimizer = read_json(file)
    ran = set().union(*by_optimizer.values())
    part.summary["kernels"]["ran"] = sorted(ran)
    if not ran:
        reason = "no kernel of ours was seen with the CPU's results: small-shapes.log says why"
        part.record("kernels that ran", Outcome(NOT_RUN, reason))
    part.save()


def run_tests(part: Part, step: str, marker: str, *, seconds: float) -> None:
    """Test by marker: most of them side by side, then those that want the GPU to themselves."""
    side_by_side = [*PYTEST, "-m", f"({marker}) and not alone"]
    if has_module("xdist"):
        side_by_side += ["-n", str(PROCESSES)]
    xml = part.work / f"{step}.xml".replace(" ", "-")
    part.run(step, [*side_by_side, f"--junitxml={xml}"], seconds=seconds)
    part.run(
        f"{step} alone",
        [*PYTEST, "-m", f"({marker}) and alone", f"--junitxml={xml.with_suffix('.alone.xml')}"],
        seconds=ALONE_SECONDS,
    )


def sanitize(
    part: Part, tool: str, optimizers: tuple[str, ...], cuda_root: Path | None, *, seconds: float
) -> None:
    """Run small shapes under a tool of compute-sanitizer."""
    program = find_tool("compute-sanitizer", cuda_root)
    if program is None:
        part.record(tool, Outcome(NOT_RUN, "compute-sanitizer is missing"))
        return
    command = [
        *sanitizer_command(program, tool),
        *module("small_shapes", "--optimizers", *optimizers),
    ]
    # without torch's cache every scratch tensor has bounds of its own
    extra = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    outcome = part.run(tool, command, seconds=seconds, judge=sanitizer_verdict, extra=extra)
    if tool == "memcheck" and outcome.result == PASSED:
        # as the same program launched them without the sanitizer, which no profiler can watch
        by_optimizer = read_json(part.work / "small-shapes.json")
        launched = set().union(*(by_optimizer.get(name, ()) for name in optimizers))
        part.summary["kernels"]["sanitized"] = sorted(launched)
        part.save()


def profile_hot_kernels(part: Part, cuda_root: Path | None) -> None:
    """Run Nsight Compute over a few launches: a report, and its table as CSV."""
    step, program = "ncu", find_tool("ncu", cuda_root)
    if program is None:
        part.record(step, Outcome(NOT_RUN, "ncu is missing"))
        return
    profile = part.work / "hot-kernels.ncu-rep"
    outcome = part.run(
        step,
        [*ncu_command(program, profile), *module("hot_kernels")],
        seconds=120,
        judge=ncu_verdict,
    )
    if outcome.result == PASSED:
        table = [program, "--import", str(profile), "--page", "details", "--csv"]
        part.run("ncu table", table, seconds=60, judge=ncu_table_verdict)


def time_steps(part: Part, step: str, *arguments: object, seconds: float) -> None:
    """Time lookups and training steps; results are kept also if one fails."""
    rows = part.work / f"{step.replace(' ', '-')}.jsonl"
    part.run(step, module("steps", "--rows", rows, *arguments), seconds=seconds)


def note_timed_kernels(part: Part, *stages: str) -> None:
    """Note the kernels of stages that have been timed.

    The launches are looked at in another process, at small sizes, because a profiler slows down
    what is timed after it.
    """
    files = ("published-case.jsonl", "steps.jsonl")
    timed = {STAGES[row["bench"]] for row in read_rows(part, *files) if row["bench"] in STAGES}
    rows = part.work / "launches.jsonl"
    small = ("--quick", "--rounds", "1", "--launches", "--rows", rows)
    part.run("launches", module("steps", "--stages", *stages, *small), seconds=60)
    launched = [
        row["kernels"]
        for row in read_rows(part, rows.name)
        if row["bench"] == "gpu_kernels" and row["case"] in timed
    ]
    part.summary["kernels"]["timed"] = sorted(set().union(*launched))
    part.save()


def read_rows(part: Part, *names: str) -> list[report.Row]:
    """Return rows of steps, in order."""
    return [row for name in names for row in report.read_rows(part.work / name)]


def write_results(part: Part, machine: dict[str, Any]) -> None:
    """Write one JSON of all rows, the plot, and a summary for reading."""
    names = ("experiments", "host", "published-case", "steps", "host-rows")
    rows = read_rows(part, *(f"{name}.jsonl" for name in names))
    stem = f"{report.slug(machine['device'])}-{machine['date'][:10]}-{part.name}"
    report.write_results(part.work / f"{stem}.json", machine, rows)
    summary = lines_of(rows)
    (part.work / "results.txt").write_text("\n".join(summary) + "\n")
    # of what is timed twice, eagerly and by replay, the screen gets the replays
    print("\n".join(line for line in summary if ", eager " not in line), flush=True)
    if any("share" in row and "limit_ms" in row for row in rows):
        image = part.work / f"{stem}.png"
        plot = module("roofline", part.work / "steps.jsonl", image, "--title", machine["device"])
        part.run("plot", plot, seconds=60)
    part.save()


def lines_of(rows: list[report.Row]) -> list[str]:
    """Return a short line per row of steps.py, misses marked."""
    lines = []
    for row in rows:
        if row["bench"] in ("gpu_experiments", "gpu_kernels"):
            continue
        value = "failed" if not row["valid"] else f"{row.get('value')} {row.get('unit')}"
        if row["ours_ms"] is not None:
            value = f"{row['ours_ms']:.4g} ms"
        parts = [f"{row['case']}: {value}"]
        if row.get("fraction") is not None:
            limit = f"limit ({row['limited_by']}, {row['ceilings']})"
            parts.append(f"{100 * row['fraction']:.0f}% of its {limit}")
        if row.get("ratio") is not None and row["ours_ms"] is not None:
            parts.append(f"{row['ratio']:.3g} of {row['peer']}")
        if row.get("met") is False or row.get("fraction_met") is False:
            parts.append("MISSED")
        if not row["valid"]:
            parts.append(row.get("reason", ""))
        lines.append(", ".join(parts))
    return lines


# -- parts --------------------------------------------------------------------------------------


def first(part: Part, machine: dict[str, Any], cuda_root: Path | None, quick: list[str]) -> None:
    compare_small_shapes(part)
    run_tests(part, "device tests", "cuda", seconds=150)
    sanitize(part, "memcheck", ("adam",), cuda_root, seconds=150)
    published = ("--stages", "published", "--assume-ceilings")
    time_steps(part, "published case", *published, *quick, seconds=120)
    write_results(part, machine)
    profile_hot_kernels(part, cuda_root)
    if not quick:
        note_timed_kernels(part, "published")


def suite(part: Part, machine: dict[str, Any], cuda_root: Path | None, quick: list[str]) -> None:
    run_tests(part, "suite", "not long", seconds=part.left() - ALONE_SECONDS)


def rest(part: Part, machine: dict[str, Any], cuda_root: Path | None, quick: list[str]) -> None:
    ceilings = part.work / "experiments.jsonl"
    part.run("experiments", module("experiments", "--rows", ceilings, *quick), seconds=150)
    time_steps(part, "host", "--stages", "host", *quick, seconds=60)  # it profiles: by itself
    both = ("--stages", "published", "dims", "--ceilings", ceilings)
    time_steps(part, "steps", *both, *quick, seconds=240)
    time_steps(part, "host rows", "--stages", "host_rows", *quick, seconds=120)
    time_steps(part, "tiers", "--stages", "tiers", *quick, seconds=150)
    write_results(part, machine)
    if not quick:
        note_timed_kernels(part, "published", "dims")
    sanitize(part, "racecheck", RACECHECK, cuda_root, seconds=100)
    sanitize(part, "initcheck", INITCHECK, cuda_root, seconds=80)


PARTS: dict[str, Callable[[Part, dict[str, Any], Path | None, list[str]], None]] = {
    "first": first,
    "suite": suite,
    "rest": rest,
}


def end_on_signal(number: int, frame: object) -> None:
    """Raise, so that running programs are ended and the record is written."""
    raise SystemExit(f"gpu-check: ended by signal {number}")


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "part", nargs="?", default="first", choices=tuple(PARTS), help="default: first"
    )
    arguments.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"budget (default {SECONDS:.0f})"
    )
    arguments.add_argument("--rebuild", action="store_true", help="build the library in any case")
    arguments.add_argument(
        "--quick", action="store_true", help="smaller sizes where time is measured: no result"
    )
    options = arguments.parse_args()
    signal.signal(signal.SIGTERM, end_on_signal)
    begin = time.monotonic()
    try:
        machine = describe_machine()
        cuda_root = find_toolkit()
    except CheckError as error:
        sys.exit(f"gpu-check: {options.part} cannot run: {error}")
    out = Path(os.environ.get("OUT") or WORK)
    seconds = options.seconds - (time.monotonic() - begin)
    part = Part(options.part, WORK / options.part, out, seconds=seconds, about=machine)
    say(f"{machine['device']}, torch {machine['torch']}, toolkit {cuda_root}, {machine['commit']}")
    if library.provide(part, machine, cuda_root, rebuild=options.rebuild):
        PARTS[options.part](part, machine, cuda_root, ["--quick"] if options.quick else [])
    part.save()
    print("\n".join(part.table()), flush=True)
    say(f"{out}/gpu-check-{part.name}.json and .tar.gz")
    if bad := part.bad():
        sys.exit(f"gpu-check: {part.name}: failed: {', '.join(bad)}")


if __name__ == "__main__":
    main()
