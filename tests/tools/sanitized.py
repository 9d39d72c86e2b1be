"""Compiles the CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer.

``build()`` makes a library that takes the place of ``torch_dynemb._C`` in a process that was
started with ``environment()``. Only what has changed is compiled again.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from emulator.build import (
    ROOT,
    SOURCES,
    compile_source,
    one_build_at_a_time,
    run_compiler,
    torch_flags,
)

OUTPUT = ROOT / "build" / "sanitized"
# what a cast makes of a number that does not fit is not the same on all devices
CHECKS = "-fsanitize=address,undefined,float-cast-overflow"
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g1",
    "-fPIC",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fno-omit-frame-pointer",
    CHECKS,
    "-fno-sanitize=vptr",  # torch's classes lack type information
    "-Wno-psabi",
]


def build() -> Path:
    """Builds the library.

    Returns:
        Its path.

    Raises:
        RuntimeError: what the compiler printed about the files that it refused.
    """
    compile_flags, link_flags = torch_flags()
    flags = [*FLAGS, *(flag for flag in compile_flags if "DYNEMB_LIBRARY" not in flag)]
    library = OUTPUT / "libdynemb_sanitized.so"
    with one_build_at_a_time(OUTPUT):
        jobs = int(os.environ.get("MAX_JOBS", len(os.sched_getaffinity(0))))
        sources = sorted(SOURCES.rglob("*.cpp"))
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(lambda s: compile_source(s, flags, output=OUTPUT), sources))
        run_compiler(
            ["-shared", CHECKS, "-pthread", "-o", str(library), *map(str, objects), *link_flags]
        )
    return library


def environment() -> dict[str, str]:
    """Variables for a Python that loads the library: the first fault ends its process."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    runtimes = [
        subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in names
    ]
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(runtimes),
        # Python keeps what it has. A request for more memory than there is fails, as without them.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=256",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


if __name__ == "__main__":
    print(build())
