"""Compiles the row store with ThreadSanitizer, and runs ``tests/storage/thread_check.cpp`` with it;
then the same of live tables and of a bucket of an index, by ``live_readers.py``.

The sources of the store need torch's headers, and no torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
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

sys.path.insert(0, str(ROOT))
import live_readers

import setup

OUTPUT = ROOT / "build" / "thread_checked"
DRIVER = ROOT / "tests" / "storage" / "thread_check.cpp"
# the cache, and the store without what is an op or made of ops
STORE = (
    *("block_io", "block_progress", "cache", "collection", "file_threads", "find_slots"),
    *("forks", "open_files", "pending_writes", "record_log", "record_map", "record_reader"),
    *("room", "row_store", "segment_files", "store_format", "store_pins", "store_worker"),
    *("thread_reader", "uring_reader", "victims"),
)
CHECK = "-fsanitize=thread"
FLAGS = ["-std=c++17", "-O1", "-g1", "-pthread", "-fno-omit-frame-pointer", "-Wno-psabi", CHECK]
STEPS = 600


def build() -> Path:
    """Builds the program; only what has changed is compiled again.

    Returns:
        Its path.

    Raises:
        RuntimeError: what the compiler printed about the files that it refused.
    """
    compile_flags, link_flags = torch_flags()
    uring = setup.wanted_uring(os.environ)
    flags, archives = [*FLAGS, *compile_flags], []
    if uring is not None:
        flags += ["-DDYNEMB_HAS_URING"]
        flags += [] if uring.headers is None else ["-isystem", str(uring.headers)]
        archives = [str(uring.archive)]
    sources = [DRIVER, *(SOURCES / "cpu" / "storage" / f"{name}.cpp" for name in STORE)]
    program = OUTPUT / "thread_check"
    with one_build_at_a_time(OUTPUT):
        jobs = int(os.environ.get("MAX_JOBS", len(os.sched_getaffinity(0))))
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(lambda s: compile_source(s, flags, output=OUTPUT), sources))
        built = [*map(str, objects), *archives, *link_flags]
        run_compiler([CHECK, "-pthread", "-o", str(program), *built])
    return program


def run(program: Path, folder: Path, steps: int) -> subprocess.CompletedProcess[str]:
    """Runs it; the exit status is not 0 where a race was found, or a row was wrong."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=66"}
    # without address randomisation, which some kernels do so widely that the sanitizer refuses
    command = ["setarch", "-R", str(program), str(folder), str(steps)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reply = run(build(), Path(folder), given.steps)
    print(reply.stdout, reply.stderr, sep="")
    if reply.returncode != 0:
        sys.exit(reply.returncode)
    seen = live_readers.run(
        live_readers.build(sanitized=True), reads=given.steps * 1000, validated=True, dim=16
    )
    print(seen)
    print(live_readers.printed(live_readers.build(live_readers.PUBLISHED, sanitized=True)))
    probes = live_readers.build(live_readers.PROBES, sanitized=True)
    found = live_readers.printed(probes, given.steps * 100)
    print(found)
    sys.exit(seen.wrong > 0 or any(found[name] for name in found if name != "reads"))
