"""Ledger of CUDA kernels that have run on a GPU, were clean under the sanitizer, were timed.

The ledger is a JSON file with a line for each kernel (:data:`PATH`). ``check.py`` notes in the
summary of each part which kernels it saw; ``merge`` brings such summaries into the ledger.

  python benchmarks/gpu/ledger.py                          # how many of how many, and the others
  python benchmarks/gpu/ledger.py merge gpu-check-first.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PATH = ROOT / "benchmarks" / "results" / "cuda-kernels.json"
SOURCES = ROOT / "csrc" / "cuda"
# What may be known of a kernel: it launched and the results equalled the CPU's; it launched in a
# program that memcheck found no fault in; it launched in something that was timed.
STATES = ("ran", "sanitized", "timed")
Ledger = dict[str, Any]

_DEFINITION = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\s*\(")
_DEMANGLED = re.compile(r"dynemb::cuda::.*?(\w+)[<(]")
_MANGLED = re.compile(r"6dynemb4cuda")


def kernels_of_sources() -> dict[str, str]:
    """Return kernel -> file under csrc/cuda, of all kernels."""
    found: dict[str, str] = {}
    for file in sorted([*SOURCES.rglob("*.cu"), *SOURCES.rglob("*.cuh")]):
        place = file.relative_to(SOURCES).as_posix()
        for name in _DEFINITION.findall(file.read_text()):
            if name in found:
                raise ValueError(
                    f"{place} and {found[name]} both have a kernel {name}: profilers could "
                    "not tell them apart, so give one another name"
                )
            found[name] = place
    return found


def kernel_of(launched: str, known: Iterable[str]) -> str | None:
    """Return our kernel with the name that a profiler gives a launch.

    Args:
        launched: the name, demangled or not; of any kernel.
        known: names of our kernels.

    Returns:
        One of ``known``, or None.
    """
    names = set(known)
    for name in _DEMANGLED.findall(launched):
        if name in names:
            return str(name)
    if _MANGLED.search(launched):
        for length, rest in re.findall(r"(?=(\d+)([A-Za-z_]\w*))", launched):
            if rest[: int(length)] in names:
                return str(rest[: int(length)])
    return None


def load(path: Path) -> Ledger:
    """Return a ledger."""
    ledger: Ledger = json.loads(path.read_text())
    return ledger


def save(ledger: Ledger, path: Path) -> None:
    """Write a ledger, a line a run and a line a kernel, so that merges are easy to read."""
    runs = [f"  {json.dumps(commit)}: {json.dumps(run)}" for commit, run in ledger["runs"].items()]
    kernels = sorted(ledger["kernels"], key=lambda kernel: (kernel["file"], kernel["kernel"]))
    lines = [f"  {json.dumps(kernel)}" for kernel in kernels]
    of_runs = "".join(["\n", ",\n".join(runs), "\n"]) if runs else ""
    path.write_text(f'{{"runs": {{{of_runs}}},\n"kernels": [\n' + ",\n".join(lines) + "\n]}\n")


def merge(ledger: Ledger, summary: dict[str, Any]) -> int:
    """Note what a run of check.py saw.

    Args:
        ledger: changed.
        summary: as check.py writes it: ``commit``, ``device``, ``date``, and ``kernels``, names by
            state.

    Returns:
        How many states of kernels are new.

    Raises:
        ValueError: the summary names no commit, or a kernel or a state that the ledger does not
            have.
    """
    if summary["commit"] == "unknown":
        raise ValueError("commit is unknown: write the commit that was run into the file")
    by_name = {kernel["kernel"]: kernel for kernel in ledger["kernels"]}
    seen: dict[str, list[str]] = summary["kernels"]
    if unknown := sorted(seen.keys() - set(STATES)):
        raise ValueError(f"kernels has {', '.join(unknown)}: expected {', '.join(STATES)}")
    if unknown := sorted({name for names in seen.values() for name in names} - by_name.keys()):
        raise ValueError(
            f"the ledger has no kernels named {', '.join(unknown)}: add a line for each to "
            f"{PATH.name}, or leave out a summary of other sources"
        )
    changed = 0
    for state, names in seen.items():
        for name in names:
            changed += by_name[name][state] != summary["commit"]
            by_name[name][state] = summary["commit"]
    if any(seen.values()):
        ledger["runs"][summary["commit"]] = {key: summary[key] for key in ("device", "date")}
    used = {kernel[state] for kernel in ledger["kernels"] for state in STATES}
    ledger["runs"] = {commit: run for commit, run in ledger["runs"].items() if commit in used}
    return changed


def sentence(ledger: Ledger) -> str:
    """Return the sentence of the READMEs about the ledger."""
    kernels = ledger["kernels"]
    counts = {state: sum(kernel[state] is not None for kernel in kernels) for state in STATES}
    if not any(counts.values()):
        return f"0 of {len(kernels)} kernels have run on a GPU."
    last = max(ledger["runs"].values(), key=lambda run: run["date"])
    return (
        f"{counts['ran']} of {len(kernels)} kernels have run on a GPU, {counts['sanitized']} under "
        f"the sanitizer, {counts['timed']} were timed (last: {last['date'][:10]}, "
        f"{last['device']})."
    )


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--ledger", type=Path, default=PATH, help="default: the repository's")
    commands = arguments.add_subparsers(dest="command")
    merging = commands.add_parser("merge", help="bring summaries of check.py into the ledger")
    merging.add_argument("summaries", type=Path, nargs="+", help="gpu-check-<part>.json")
    options = arguments.parse_args()
    ledger = load(options.ledger)
    if options.command == "merge":
        for path in options.summaries:
            try:
                changed = merge(ledger, json.loads(path.read_text()))
            except (KeyError, ValueError) as error:
                sys.exit(f"{path}: {error}")
            print(f"{path.name}: {changed} entries changed")
        save(ledger, options.ledger)
    print(sentence(ledger))
    for kernel in ledger["kernels"]:
        if kernel["ran"] is None:
            print(f"never ran: {kernel['kernel']} ({kernel['file']}): {kernel['ops']}")


if __name__ == "__main__":
    main()
