"""Processes with a sanitized emulator, and what its sanitizer has found in them.

The environment variable EMULATOR_CHECK, which ``environment_of`` sets, chooses the build.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections import defaultdict
from dataclasses import dataclass

from emulator.build import build

RUNTIMES = {"bounds": "libasan.so", "races": "libtsan.so"}


def command_of(check: str) -> list[str]:
    """What comes before a command: without randomized addresses, which ThreadSanitizer refuses."""
    return ["setarch", "-R"] if check == "races" else []


def environment_of(check: str, *, fill: int = 0xA5) -> dict[str, str]:
    """Variables of a process that loads the library.

    Args:
        check: a key of CHECKS.
        fill: a byte of which fresh memory of "bounds" is full.
    """
    build(check)
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    runtimes = [
        subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in (RUNTIMES[check], "libubsan.so", "libstdc++.so")
    ]
    return {
        **os.environ,
        "EMULATOR_CHECK": check,
        "LD_PRELOAD": ":".join(runtimes),
        # Python keeps what it has
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=0:allocator_may_return_null=1"
        f":max_malloc_fill_size=1000000000:malloc_fill_byte={fill}",
        # the library's own threads synchronize by atomics that this sanitizer does not see
        "TSAN_OPTIONS": "exitcode=0:report_thread_leaks=0:die_after_fork=0"
        ":ignore_noninstrumented_modules=1:suppress_equal_addresses=0",
        "OMP_NUM_THREADS": "1",
    }


@dataclass(frozen=True)
class Finding:
    """One report of a sanitizer.

    Attributes:
        kind: as the sanitizer names it.
        places: file:line below csrc of each access.
    """

    kind: str
    places: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {' and '.join(self.places)}"


_REPORT = re.compile(
    r"(?:WARNING: ThreadSanitizer: (?P<race>[^(\n]+) \(|ERROR: AddressSanitizer: (?P<address>\S+))"
)
_ACCESS = re.compile(r"^ *(?:Previous |Atomic |atomic )*(?:read|write) of size", re.IGNORECASE)
_FRAME = re.compile(r"^ +#\d+ .*?/(csrc/\S+?:\d+)")


def findings_of(output: str) -> dict[Finding, list[str]]:
    """The different reports in the output of a process, each with the cases that led to it."""
    found: dict[Finding, list[str]] = defaultdict(list)
    case = ""
    kind = ""
    places: list[str] = []
    wanted = False

    def end() -> None:
        nonlocal kind
        if kind:
            finding = Finding(kind, tuple(sorted(set(places))))
            if case not in found[finding]:
                found[finding].append(case)
        kind = ""

    for line in output.splitlines():
        if line.startswith("case: "):
            end()
            case = line.removeprefix("case: ").strip()
        elif report := _REPORT.search(line):
            end()
            kind = report["race"] or report["address"]
            places, wanted = [], False
        elif _ACCESS.match(line):
            wanted = True
        elif wanted and (frame := _FRAME.match(line)):
            places.append(frame[1])
            wanted = False
        elif not line.strip():
            wanted = False
    end()
    return dict(found)
