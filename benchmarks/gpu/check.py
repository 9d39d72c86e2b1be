"""Program that checks and times the CUDA kernels on this machine's GPU, in order of worth.

No network and no environment of its own: the python3 that runs this must have torch with CUDA,
pytest and matplotlib. Parts, each within --seconds; what does not fit is cut from the end::

  first  every op on small shapes against the CPU, each part by itself; four checks of what no
         emulator shows; the published case eager and replayed; times of kernels; memcheck with
         Adam; Nsight Compute on the hot kernels
  suite  the tests of the device, then the test suite on the GPU: four processes, then alone what
         takes all memory
  rest   ceilings of the GPU, waits of the host, the published case and all widths, rows in host
         memory, racecheck, initcheck; JSON and a plot

All three fit into fifteen minutes. Each step has a share of its part's seconds, so that none takes
the time of those after it.

torch_dynemb/_C.abi3.so is taken if it works on this GPU, else built for it alone, by nvcc. The
directory in the environment variable OUT (or build/gpu-check) gets gpu-check-<part>.json, what
became of each step, and gpu-check-<part>.tar.gz, all logs and results; both also while it runs.
Results name the commit: that in the environment variable COMMIT, if it is set.
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

# Limits of the steps of a part. Their sum is the default of --seconds; another one scales them.
LIMITS: dict[str, dict[str, float]] = {
    "first": {
        "library found": library.TRY_SECONDS,
        "small shapes": 60,
        "first contact": 40,
        "published case": 30,
        "kernel times": 25,
        "memcheck": 30,
        "ncu": 35,
        "ncu table": 10,
    },
    "suite": {
        "library found": library.TRY_SECONDS,
        "device tests": 60,
        "device tests alone": 30,
        "suite": 130,
        "suite alone": 40,
    },
    "rest": {
        "library found": library.TRY_SECONDS,
        "experiments": 40,
        "host": 20,
        "steps": 50,
        "host rows": 15,
        "tiers": 15,
        "plot": 10,
        "launches": 15,
        "racecheck": 20,
        "initcheck": 15,
    },
}
WATCHDOG = 20.0  # seconds of one part of small shapes
PROCESSES = max(3 * len(os.sched_getaffinity(0)) // 4, 2)  # that share the GPU
WORK = ROOT / "build" / "gpu-check"
PYTEST = [
    *(sys.executable, "-m", "pytest", "tests", "--device", "cuda", "-v", "--durations=20"),
    *("--timeout", "25", "--continue-on-collection-errors"),
]
STAGES = {"gpu_published": "published", "gpu_ops": "dims"}  # by benchmark in a row
SANITIZED = ("adam", ("insertion", "pooled", "sequence", "split_update"))


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


# -- steps --------------------------------------------------------------------------------------


def limit(part: Part, step: str) -> float:
    """Return the seconds that a step may take."""
    limits = LIMITS[part.name]
    return limits[step] * part.seconds / sum(limits.values())


def small_shape_records(part: Part) -> list[dict[str, Any]]:
    """Return what is known of parts of small shapes."""
    files = sorted(part.work.glob("small-shapes.*.jsonl"))
    return [row for file in files for row in report.read_rows(file)]


def compare_small_shapes(part: Part) -> None:
    """Compare every op on small shapes with the CPU; note the kernels that it launched."""
    step = "small shapes"
    seconds = limit(part, step)
    arguments = ("--records", part.work / "small-shapes.jsonl", "--jobs", PROCESSES)
    arguments += ("--seconds", max(seconds - WATCHDOG, seconds / 2))
    part.run(step, module("isolated_parts", *arguments), seconds=seconds)
    records = small_shape_records(part)
    part.summary["parts"] = [one for one in records if one["result"] != "passed"]
    ran = {kernel for one in records if one["result"] == "passed" for kernel in one["kernels"]}
    part.summary["kernels"]["ran"] = sorted(ran)
    if not ran:
        reason = "no kernel of ours was seen with the CPU's results: small-shapes.log says why"
        part.record("kernels that ran", Outcome(NOT_RUN, reason))
    part.save()


def make_first_contact(part: Part) -> None:
    """Check what no emulator shows."""
    step = "first contact"
    records = part.work / "first-contact.jsonl"
    part.run(step, module("first_contact", "--records", records), seconds=limit(part, step))
    part.summary["first_contact"] = report.read_rows(records)
    part.save()


def run_tests(part: Part, step: str, marker: str) -> None:
    """Test by marker: most of them side by side, then those that want the GPU to themselves."""
    side_by_side = [*PYTEST, "-m", f"({marker}) and not alone"]
    if has_module("xdist"):
        side_by_side += ["-n", str(PROCESSES)]
    xml = part.work / f"{step}.xml".replace(" ", "-")
    part.run(step, [*side_by_side, f"--junitxml={xml}"], seconds=limit(part, step))
    alone = f"{step} alone"
    part.run(
        alone,
        [*PYTEST, "-m", f"({marker}) and alone", f"--junitxml={xml.with_suffix('.alone.xml')}"],
        seconds=limit(part, alone),
    )


def sanitize(part: Part, tool: str, cuda_root: Path | None) -> None:
    """Run some parts of small shapes, on plain tensors, under a tool of compute-sanitizer."""
    program = find_tool("compute-sanitizer", cuda_root)
    if program is None:
        part.record(tool, Outcome(NOT_RUN, "compute-sanitizer is missing"))
        return
    optimizer, names = SANITIZED
    shapes = module("small_shapes", "--plain", "--optimizers", optimizer, "--parts", *names)
    outcome = part.run(
        tool,
        [*sanitizer_command(program, tool), *shapes],
        seconds=limit(part, tool),
        judge=sanitizer_verdict,
        # without torch's cache every tensor has bounds of its own
        extra={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    if tool == "memcheck" and outcome.result == PASSED:
        # as the same parts launched them without the sanitizer, which no profiler can watch
        launched = {
            kernel
            for one in small_shape_records(part)
            if one["optimizer"] == optimizer and one["part"] in names
            for kernel in one["kernels"]
        }
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
        seconds=limit(part, step),
        judge=ncu_verdict,
    )
    if outcome.result == PASSED:
        table = [program, "--import", str(profile), "--page", "details", "--csv"]
        seconds = limit(part, "ncu table")
        part.run("ncu table", table, seconds=seconds, judge=ncu_table_verdict)


def time_steps(part: Part, step: str, *arguments: object) -> None:
    """Time lookups and training steps; results are kept also if one fails."""
    rows = part.work / f"{step.replace(' ', '-')}.jsonl"
    part.run(step, module("steps", "--rows", rows, *arguments), seconds=limit(part, step))


def note_timed_kernels(part: Part, *stages: str) -> None:
    """Note the kernels of stages that have been timed.

    The launches are looked at in another process, at small sizes, because a profiler slows down
    what is timed after it.
    """
    timed = {
        STAGES[row["bench"]] for row in read_rows(part, "steps.jsonl") if row["bench"] in STAGES
    }
    rows = part.work / "launches.jsonl"
    small = ("--quick", "--rounds", "1", "--launches", "--rows", rows)
    command = module("steps", "--stages", *stages, *small)
    part.run("launches", command, seconds=limit(part, "launches"))
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
    if any("share" in row and "limit_ms" in row for row in read_rows(part, "steps.jsonl")):
        image = part.work / f"{stem}.png"
        plot = module("roofline", part.work / "steps.jsonl", image, "--title", machine["device"])
        part.run("plot", plot, seconds=limit(part, "plot"))
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
    make_first_contact(part)
    time_steps(
        part, "published case", "--stages", "published", "--assume-ceilings", "--rounds", 3, *quick
    )
    write_results(part, machine)
    part.run("kernel times", module("hot_kernels", "--times"), seconds=limit(part, "kernel times"))
    sanitize(part, "memcheck", cuda_root)
    profile_hot_kernels(part, cuda_root)


def suite(part: Part, machine: dict[str, Any], cuda_root: Path | None, quick: list[str]) -> None:
    run_tests(part, "device tests", "cuda")
    run_tests(part, "suite", "not long and not cuda")


def rest(part: Part, machine: dict[str, Any], cuda_root: Path | None, quick: list[str]) -> None:
    ceilings = part.work / "experiments.jsonl"
    experiments = module("experiments", "--rows", ceilings, *quick)
    part.run("experiments", experiments, seconds=limit(part, "experiments"))
    time_steps(part, "host", "--stages", "host", *quick)  # it profiles: by itself
    time_steps(part, "steps", "--stages", "published", "dims", "--ceilings", ceilings, *quick)
    time_steps(part, "host rows", "--stages", "host_rows", *quick)
    time_steps(part, "tiers", "--stages", "tiers", *quick)
    write_results(part, machine)
    if not quick:
        note_timed_kernels(part, "published", "dims")
    sanitize(part, "racecheck", cuda_root)
    sanitize(part, "initcheck", cuda_root)


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
    budgets = {name: sum(limits.values()) for name, limits in LIMITS.items()}
    default = ", ".join(f"{name} {seconds:.0f}" for name, seconds in budgets.items())
    arguments.add_argument("--seconds", type=float, help=f"budget (default: {default})")
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
    seconds = options.seconds or budgets[options.part]
    seconds -= time.monotonic() - begin
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
