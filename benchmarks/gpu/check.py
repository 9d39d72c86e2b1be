"""Builds, tests, sanitizes and times the CUDA kernels on this machine's GPU.

No network and no environment of its own: the python3 that runs this must have torch with CUDA,
pytest and matplotlib, and there must be an nvcc. Parts:

  build     compiles the library for this GPU
  test      all tests but the long ones, on the GPU
  sanitize  compute-sanitizer over every op on small shapes
  bench     ceilings of the GPU, first experiments, lookups, training steps; JSON and a plot
  all       these, in order; a failing build ends it

Results and logs go to the directory in the environment variable OUT, or to benchmarks/results.
Results name the commit; in a copy without git, set the environment variable COMMIT.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = ("build", "test", "sanitize", "bench")
PART_SECONDS = 570  # a part ends within ten minutes
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck")
FINDINGS = 86  # exit status of a sanitizer that found something
# What a sanitizer says, in lines of its own, where the machine does not let it work.
REFUSALS = ("device not supported", "not supported on", "unable to", "internal sanitizer error")

# Printed as JSON by another process, so that this one neither imports torch nor holds the GPU.
PROBE = """
import json, torch
available = torch.cuda.is_available()
capability = torch.cuda.get_device_capability() if available else None
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda,
                  "available": available, "capability": capability}))
"""
NVCC_ROOT = """
import os, setup
print(setup.find_cuda_root(os.environ) or "")
"""
BUILT = """
import torch_dynemb.ops as ops
assert ops.has_cuda_kernels(), "the library was built without CUDA kernels"
print(f"{ops.available_cuda_memory(0) >> 20} MiB of the GPU are free")
"""


class CheckError(Exception):
    """A part cannot run, or failed."""


def say(text: str) -> None:
    """A line of progress."""
    print(f"gpu-check: {text}", flush=True)


def output_directory() -> Path:
    """Where results and logs go."""
    path = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    path.mkdir(parents=True, exist_ok=True)
    return path


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of what is run: the repository's root on PYTHONPATH."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(extra or {})}


def run(
    command: Sequence[str],
    log: Path,
    *,
    seconds: float,
    extra: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> int:
    """Runs a program in the repository's root; its output goes to a log and to stdout.

    A program that takes too long is interrupted, as by Ctrl-C, and killed fifteen seconds later.

    Args:
        command: program and arguments.
        log: file for stdout and stderr.
        seconds: time that it may take.
        extra: further environment variables.
        quiet: print the end of the output only.

    Returns:
        The exit status; 124 for a program that took too long.
    """
    say(" ".join(command))
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(extra),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        end = time.monotonic() + seconds
        late = False
        printed = 0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)
            if not quiet:
                printed = print_from(log, printed)
            if process.returncode is not None:
                break
            if time.monotonic() > end:
                if late:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    break
                say(f"interrupted after {seconds:.0f} s")
                late = True
                os.killpg(process.pid, signal.SIGINT)
                end += 15
    if quiet:
        print_from(log, max(log.stat().st_size - 2000, 0))
    else:
        print_from(log, printed)
    return 124 if late else process.wait()


def print_from(log: Path, begin: int) -> int:
    """Prints what a log has from a byte on; returns its end."""
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read()
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return begin + len(text)


def probe_gpu() -> dict[str, Any]:
    """What torch says about the GPU.

    Raises:
        CheckError: no torch, no CUDA in it, or no GPU.
    """
    reply = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if reply.returncode != 0:
        raise CheckError(
            f"{sys.executable} cannot import torch: set GPU_PYTHON to a python3 that has it\n"
            + reply.stderr[-1000:]
        )
    found: dict[str, Any] = json.loads(reply.stdout.splitlines()[-1])
    if found["cuda"] is None:
        raise CheckError(
            f"torch {found['torch']} of {sys.executable} has no CUDA: set GPU_PYTHON to a python3 "
            "whose torch has"
        )
    if not found["available"]:
        raise CheckError(f"torch {found['torch']} finds no GPU: run this on a machine with one")
    return found


def find_nvcc_root() -> Path:
    """The toolkit that setup.py would use.

    Raises:
        CheckError: there is none.
    """
    reply = subprocess.run(
        [sys.executable, "-c", NVCC_ROOT],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    lines = reply.stdout.splitlines()
    if reply.returncode != 0 or not lines or not lines[-1]:
        raise CheckError(
            "there is no nvcc in CUDA_HOME, on PATH or in /usr/local/cuda: install the CUDA "
            f"toolkit\n{reply.stderr[-1000:]}"
        )
    return Path(lines[-1])


def build(out: Path) -> None:
    """Compiles the library for this GPU."""
    found = probe_gpu()
    cuda_root = find_nvcc_root()
    architecture = ".".join(str(number) for number in found["capability"])
    cores = str(len(os.sched_getaffinity(0)))
    say(f"torch {found['torch']}, toolkit {cuda_root}, architecture {architecture}, {cores} cores")
    begin = time.monotonic()
    status = run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        out / "build.log",
        seconds=PART_SECONDS,
        extra={
            "TORCH_CUDA_ARCH_LIST": architecture,
            "MAX_JOBS": cores,
            "CUDA_HOME": str(cuda_root),
        },
        quiet=True,
    )
    if status != 0:
        raise CheckError(f"the build ended with status {status}: see {out / 'build.log'}")
    say(f"built in {time.monotonic() - begin:.0f} s")
    if run([sys.executable, "-c", BUILT], out / "built.log", seconds=60) != 0:
        raise CheckError("the library that was built does not load")


def has_module(name: str) -> bool:
    """Whether this python can import a module."""
    from importlib.util import find_spec

    return find_spec(name) is not None


def test(out: Path) -> None:
    """Runs the tests on the GPU."""
    probe_gpu()
    command = [sys.executable, "-m", "pytest", "tests", "-m", "not long", "--device", "cuda"]
    command += ["--timeout", "300", "-q", "--durations=20", "--continue-on-collection-errors"]
    command += [f"--junitxml={out / 'tests.xml'}"]
    if has_module("xdist"):
        command += ["-n", "4"]
    status = run(command, out / "tests.log", seconds=PART_SECONDS - 20)
    if status != 0:
        raise CheckError(f"the tests ended with status {status}: see {out / 'tests.log'}")


def find_sanitizer() -> str | None:
    """compute-sanitizer, on PATH or in the toolkit."""
    if found := shutil.which("compute-sanitizer"):
        return found
    try:
        root = find_nvcc_root()
    except CheckError:
        return None
    for place in ("bin", "compute-sanitizer"):
        program = root / place / "compute-sanitizer"
        if program.is_file():
            return str(program)
    return None


def verdict(status: int, text: str) -> dict[str, Any]:
    """What a sanitizer's run means.

    Args:
        status: its exit status.
        text: what it and the program printed.

    Returns:
        ``result``: "clean", "findings", "not run" or "failed", with ``reason`` unless clean.
    """
    for line in text.splitlines():
        if line.startswith("=====") and any(words in line.lower() for words in REFUSALS):
            return {"result": "not run", "reason": line.strip("= ")}
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    if not summaries:
        if status == 124:
            return {"result": "failed", "reason": "it took too long"}
        last = (text.strip().splitlines() or [""])[-1]
        reason = f"no summary was printed; status {status}, last line: {last[:300]}"
        return {"result": "not run", "reason": reason}
    if any(int(count) > 0 for count in summaries) or status == FINDINGS:
        return {"result": "findings", "reason": f"{max(map(int, summaries))} reported"}
    if status != 0:
        return {"result": "failed", "reason": f"the program ended with status {status}"}
    return {"result": "clean"}


def sanitize(out: Path) -> None:
    """Runs every op under the tools of compute-sanitizer."""
    probe_gpu()
    program = [sys.executable, "-m", "benchmarks.gpu.small_shapes"]
    results: dict[str, dict[str, Any]] = {}
    report = out / "sanitize.json"
    end = time.monotonic() + PART_SECONDS

    def note(tool: str, result: dict[str, Any]) -> None:
        results[tool] = result
        report.write_text(json.dumps(results, indent=1) + "\n")
        say(f"{tool}: {result['result']} {result.get('reason', '')}".rstrip())

    status = run(program, out / "sanitize-none.log", seconds=120)
    passed: dict[str, Any] = {"result": "clean"}
    note("none", passed if status == 0 else {"result": "failed", "reason": f"status {status}"})
    sanitizer = find_sanitizer()
    for number, tool in enumerate(SANITIZER_TOOLS):
        if sanitizer is None:
            note(tool, {"result": "not run", "reason": "there is no compute-sanitizer"})
            continue
        # our kernels only: what torch's leave unwritten on purpose is no finding
        ours = ["--kernel-regex", "kns=dynemb"] if tool == "initcheck" else []
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FINDINGS), *ours]
        if tool == "memcheck":
            command += ["--report-api-errors", "no"]  # torch probes; the library checks its calls
        # without torch's cache every scratch tensor has bounds of its own
        extra = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        log = out / f"sanitize-{tool}.log"
        seconds = max((end - time.monotonic()) / (len(SANITIZER_TOOLS) - number), 30)
        status = run([*command, *program], log, seconds=seconds, extra=extra, quiet=True)
        note(tool, {**verdict(status, log.read_text(errors="replace")), "log": log.name})
    bad = [tool for tool, r in results.items() if r["result"] in ("findings", "failed")]
    if bad:
        raise CheckError(f"{', '.join(bad)}: findings or failures; see {report}")


def bench(out: Path, *, quick: bool) -> None:
    """Runs the benchmarks; whatever has been measured is kept, also where one fails."""
    probe_gpu()
    described = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.device"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    if described.returncode != 0:
        raise CheckError(f"the device cannot be described:\n{described.stderr[-2000:]}")
    machine: dict[str, Any] = json.loads(described.stdout.splitlines()[-1])
    flags = ["--quick"] if quick else []
    files = [out / "experiments.jsonl", out / "steps.jsonl"]
    for file in files:
        file.unlink(missing_ok=True)
    end = time.monotonic() + PART_SECONDS - 20
    failed: list[str] = []
    for name, seconds, arguments in (
        ("experiments", 200.0, []),
        ("steps", 600.0, ["--ceilings", str(files[0])]),
    ):
        status = run(
            [
                sys.executable,
                "-m",
                f"benchmarks.gpu.{name}",
                "--rows",
                str(out / f"{name}.jsonl"),
                *arguments,
                *flags,
            ],
            out / f"bench-{name}.log",
            seconds=max(min(seconds, end - time.monotonic()), 10),
            quiet=True,
        )
        if status != 0:
            failed.append(f"{name} ended with status {status}: see {out / f'bench-{name}.log'}")
    rows = [line for file in files if file.is_file() for line in complete_lines(file.read_text())]
    stem = f"{slug(machine['device'])}-{machine['date'][:10]}" + ("-quick" if quick else "")
    path = out / f"{stem}.json"
    lines = ",\n".join(f"  {line}" for line in rows)
    path.write_text(f'{{"machine": {json.dumps(machine, indent=1)},\n"rows": [\n{lines}\n]}}\n')
    say(f"{len(rows)} rows: {path}")
    plot = [
        sys.executable,
        "-m",
        "benchmarks.gpu.roofline",
        str(files[1]),
        str(out / f"{stem}.png"),
    ]
    if run([*plot, "--title", machine["device"]], out / "bench-plot.log", seconds=60) != 0:
        failed.append("there is no plot")
    summary = summary_of([json.loads(line) for line in rows])
    (out / "bench.txt").write_text("\n".join(summary) + "\n")
    # of what is timed twice, eagerly and by replay, the screen gets the replays
    print("\n".join(line for line in summary if ", eager " not in line), flush=True)
    if failed:
        raise CheckError("; ".join(failed))


def complete_lines(text: str) -> list[str]:
    """Lines that are whole JSON: a program that was killed may have left half a line."""
    lines = []
    for line in text.splitlines():
        try:
            json.loads(line)
        except json.JSONDecodeError:
            continue
        lines.append(line)
    return lines


def slug(name: str) -> str:
    """A device's name for file names, such as ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def summary_of(rows: list[dict[str, Any]]) -> list[str]:
    """A short line per row of steps.py, misses marked."""
    lines = []
    for row in rows:
        if row["bench"] == "gpu_experiments":
            continue
        value = "failed" if not row["valid"] else f"{row.get('value')} {row.get('unit')}"
        if row["ours_ms"] is not None:
            value = f"{row['ours_ms']:.4g} ms"
        parts = [f"{row['case']}: {value}"]
        if row.get("fraction") is not None:
            parts.append(f"{100 * row['fraction']:.0f}% of its limit ({row['limited_by']})")
        if row.get("ratio") is not None and row["ours_ms"] is not None:
            parts.append(f"{row['ratio']:.3g} of {row['peer']}")
        if row.get("met") is False or row.get("fraction_met") is False:
            parts.append("MISSED")
        if not row["valid"]:
            parts.append(row.get("reason", ""))
        lines.append(", ".join(parts))
    return lines


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "part", nargs="?", default="all", choices=(*PARTS, "all"), help="default: all"
    )
    arguments.add_argument(
        "--quick", action="store_true", help="smaller sizes in bench: a check, no result"
    )
    options = arguments.parse_args()
    parts = PARTS if options.part == "all" else (options.part,)
    failed: list[str] = []
    for part in parts:
        begin = time.monotonic()
        try:
            out = output_directory()
            if part == "build":
                build(out)
            elif part == "test":
                test(out)
            elif part == "sanitize":
                sanitize(out)
            else:
                bench(out, quick=options.quick)
        except CheckError as error:
            failed.append(part)
            print(f"gpu-check: {part} failed: {error}", file=sys.stderr, flush=True)
            if part == "build":
                break
        else:
            say(f"{part} passed in {time.monotonic() - begin:.0f} s")
    if failed:
        raise SystemExit(f"gpu-check: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
