"""compute-sanitizer and Nsight Compute: where they are, how they are called, what they say."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from benchmarks.gpu.part import FAILED, FINDINGS, NOT_RUN, PASSED, Outcome, last_line

FOUND_SOMETHING = 86  # exit status of a sanitizer that found something
# What a sanitizer says, in lines of its own, where the machine does not let it work.
REFUSALS = ("device not supported", "not supported on", "unable to", "internal sanitizer error")
# Where a step of the table's life passes most of its time; see csrc/README.md, "Launches".
HOT_KERNELS = ("gather_rows", "pool_bags", "update_rows", "find_or_claim")
# Sections, because names of single metrics differ from GPU to GPU.
NCU_SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",
    "Occupancy",
    "LaunchStats",
    "WarpStateStats",
)


def find_tool(name: str, cuda_root: Path | None) -> str | None:
    """Return a tool of the CUDA toolkit, on PATH, in the toolkit or where installers put it.

    Args:
        name: ``compute-sanitizer`` or ``ncu``.
        cuda_root: the toolkit, if there is one.
    """
    if found := shutil.which(name):
        return found
    places: list[Path] = []
    for root in filter(None, [cuda_root, Path("/usr/local/cuda"), Path("/opt/nvidia")]):
        places += [root / "bin" / name, root / name / name]
        places += sorted(root.glob(f"nsight-compute*/{name}"), reverse=True)
        places += sorted(root.glob(f"nsight-compute/*/{name}"), reverse=True)
    return next((str(place) for place in places if place.is_file()), None)


def sanitizer_command(program: str, tool: str) -> list[str]:
    """Return compute-sanitizer and its options; the command to check comes after them."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND_SOMETHING)]
    # our kernels only: it is faster, and torch's leave some memory unwritten on purpose
    command += ["--kernel-regex", "kns=dynemb"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # torch probes; the library checks its calls
    return command


def sanitizer_verdict(status: int, text: str) -> Outcome:
    """Return the meaning of a sanitizer's run.

    Args:
        status: its exit status.
        text: what it and the program printed.
    """
    for line in text.splitlines():
        if line.startswith("=====") and any(words in line.lower() for words in REFUSALS):
            return Outcome(NOT_RUN, line.strip("= "))
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    if not summaries:
        return Outcome(NOT_RUN, f"no summary was printed; status {status}: {last_line(text)}")
    if any(int(count) > 0 for count in summaries) or status == FOUND_SOMETHING:
        return Outcome(FINDINGS, f"{max(map(int, summaries))} reported")
    if status != 0:
        return Outcome(FAILED, f"the program ended with status {status}")
    return Outcome(PASSED, "nothing was reported")


def ncu_command(program: str, report: Path) -> list[str]:
    """Return the command of Nsight Compute over the hot kernels, between the profiler's marks.

    The clocks are left alone: the machine may not be ours.
    """
    command = [program, "--target-processes", "all", "--profile-from-start", "off"]
    command += ["--clock-control", "none", "--force-overwrite", "--export", str(report)]
    command += ["--kernel-name", f"regex:.*({'|'.join(HOT_KERNELS)}).*"]
    for section in NCU_SECTIONS:
        command += ["--section", section]
    return command


def ncu_verdict(status: int, text: str) -> Outcome:
    """Return the meaning of a run of Nsight Compute: without counters it has not run."""
    found = re.search(r"^==ERROR== (?!The application returned).*", text, re.MULTILINE)
    if found is not None:
        return Outcome(NOT_RUN, found.group(0)[:300])
    if status != 0:
        return Outcome(FAILED, f"status {status}: {last_line(text)}")
    if "No kernels were profiled" in text:
        return Outcome(FAILED, "no kernel of these names was launched")
    return Outcome(PASSED, last_line(text))


def ncu_table_verdict(status: int, text: str) -> Outcome:
    """Return whether a printed report has all the hot kernels."""
    if missing := [name for name in HOT_KERNELS if name not in text]:
        return Outcome(FAILED, f"the report lacks {', '.join(missing)}; status {status}")
    return Outcome(PASSED, f"{len(HOT_KERNELS)} kernels")
