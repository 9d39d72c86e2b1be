"""Package that two threads run, and package with rows that a thread updates meanwhile."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from common.report import Row, compare
from common.timing import Timing, interleave_rounds

import torch_dynemb as td

from .calls import BENCH, Case, medians, percentiles_99
from .models import FEATURES, batch, id_of
from .programs import Programs

ONE_THREAD = "one thread"
NO_UPDATES = "no updates"
RATE = 100_000  # rows a second
TWO_RUNNERS = Case(256, 20, 1 / 1.7)
BESIDE_A_WRITER = Case(256, 20, 1.2)


def _ids(ids: int, case: Case) -> list[torch.Tensor]:
    return [id_of(rows) for rows in batch(ids, case.batch, case.length, 1).values()]


def _of_two(language: str, two: Timing, one: Timing) -> Row:
    name = f"{TWO_RUNNERS.name(language)}, two runners, time a call"
    return compare(BENCH, name, two, ONE_THREAD, one, target=TWO_RUNNERS.target)


def two_runners_cpp(programs: Programs, package: Path, ids: int, rounds: int, calls: int) -> Row:
    """Return two threads of a C++ program against one."""
    given = [_ids(ids, TWO_RUNNERS)]
    taken: dict[int, list[float]] = {1: [], 2: []}
    for line in programs.printed("live", [package], given, rounds, calls, "runners"):
        threads, microseconds = line.split()
        taken[int(threads)].append(float(microseconds) / 1e3 / calls / int(threads))
    return _of_two("C++", Timing(tuple(taken[2])), Timing(tuple(taken[1])))


def two_runners_python(package: Path, ids: int, rounds: int, calls: int) -> Row:
    """Return two threads of this process against one."""
    given = dict(zip(batch(1, 1, 1, 0), _ids(ids, TWO_RUNNERS), strict=True))
    with td.serving.load(package, runners=2) as model:

        def run_by(threads: int) -> float:
            """Return milliseconds of a call."""
            together = threading.Barrier(threads + 1)

            def run() -> None:
                torch.set_num_threads(1)  # each thread has a number of its own
                model.run(given)
                together.wait()
                for _ in range(calls):
                    model.run(given)
                together.wait()

            running = [threading.Thread(target=run) for _ in range(threads)]
            for thread in running:
                thread.start()
            together.wait()
            begin = time.perf_counter()
            together.wait()
            taken = time.perf_counter() - begin
            for thread in running:
                thread.join()
            return 1e3 * taken / calls / threads

        timings = interleave_rounds(
            {"two": lambda number: run_by(2), "one": lambda number: run_by(1)},
            rounds=rounds,
            warmup=1,
        )
    return _of_two("Python", timings["two"], timings["one"])


def beside_a_writer(
    programs: Programs, package: Path, ids: int, rounds: int, calls: int
) -> Iterator[Row]:
    """Compare runs of a live package beside a thread that replaces rows with runs alone."""
    words = (rounds, calls, "writer", FEATURES, ids, RATE)
    taken: dict[str, list[list[float]]] = defaultdict(list)
    given = [_ids(ids, BESIDE_A_WRITER)]
    for line in programs.printed("live", [package], given, *words):
        name, *values = line.split()
        taken[name].append([float(value) / 1e3 for value in values])
    rate = min(1e3 * value for (value,) in taken["rows"])
    name = f"{BESIDE_A_WRITER.name('C++')}, {RATE} rows a second updated"
    for part, timing, target in (
        ("p50", medians, None),
        ("p99", percentiles_99, BESIDE_A_WRITER.target),
    ):
        yield compare(
            BENCH,
            f"{name}, {part}",
            timing(taken["updated"]),
            NO_UPDATES,
            timing(taken["idle"]),
            target=target,
            least_rows_a_second=rate,
        )
