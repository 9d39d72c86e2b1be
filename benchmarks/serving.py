"""Compiled models that are served: p50 and p99 of a call, against nn.EmbeddingBag's.

Eight tables, D=16, three dense layers, one thread; uniform ids, all of them known. Both models are
packages of AOTInductor; ours is called through serving.load, or the C++ reader, with its checks.
Then two threads with two runners against one, and a package with rows that are updated meanwhile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from common.command import is_selected, parser, positive
from common.report import Report, Row, compare
from common.timing import interleave_rounds
from served.calls import BENCH, Calls, Case, medians, percentiles_99
from served.models import batch, id_of, write_live_package, write_packages
from served.programs import Programs
from served.threads import (
    BESIDE_A_WRITER,
    NO_UPDATES,
    ONE_THREAD,
    TWO_RUNNERS,
    beside_a_writer,
    two_runners_cpp,
    two_runners_python,
)

import torch_dynemb as td

PEER = "nn.EmbeddingBag, AOTI"
PYTHON = (Case(1, 1, None), Case(256, 1, 1.2), Case(256, 20, 1.2))
CPP = (Case(1, 1, 0.5), Case(256, 1, 1.2), Case(256, 20, 1.1))
ROWS = 2 * (len(PYTHON) + len(CPP)) + 4


def rows_of(
    case: Case, language: str, ours: list[list[float]], peer: list[list[float]]
) -> Iterator[Row]:
    """Yield rows of p50 and p99 from the milliseconds of calls, round by round."""
    name = case.name(language)
    half = [medians(rounds) for rounds in (ours, peer)]
    yield compare(BENCH, f"{name}, p50", half[0], PEER, half[1], target=case.target)
    most = [percentiles_99(rounds) for rounds in (ours, peer)]
    yield compare(BENCH, f"{name}, p99", most[0], PEER, most[1])


def python_rows(
    case: Case, packages: tuple[Path, Path], ids: int, rounds: int, calls: int
) -> Iterator[Row]:
    rows = batch(ids, case.batch, case.length, 1)
    known = {name: id_of(row) for name, row in rows.items()}
    peer = torch._inductor.aoti_load_package(str(packages[1]))
    with td.serving.load(packages[0]) as ours, torch.inference_mode():
        ours_calls, peer_calls = (
            Calls(lambda: ours.run(known), calls),
            Calls(lambda: peer(rows), calls),
        )
        interleave_rounds({"ours": ours_calls, "peer": peer_calls}, rounds=rounds, warmup=1)
    yield from rows_of(case, "Python", ours_calls.rounds[1:], peer_calls.rounds[1:])


def cpp_rows(
    case: Case, programs: Programs, packages: tuple[Path, Path], ids: int, rounds: int, calls: int
) -> Iterator[Row]:
    rows = list(batch(ids, case.batch, case.length, 1).values())
    inputs = ([id_of(row) for row in rows], rows)
    taken: dict[str, list[list[float]]] = {"ours": [], "static": []}
    for line in programs.printed("packages", packages, inputs, rounds, calls):
        name, *times = line.split()
        taken[name].append([float(value) / 1e3 for value in times])
    yield from rows_of(case, "C++", taken["ours"], taken["static"])


class Packages:
    """Packages of bags of a length, made when the first case wants them.

    Args:
        folder: of all packages.
        ids: of each table.
    """

    def __init__(self, folder: Path, ids: int) -> None:
        self._folder, self._ids = folder, ids
        self._made: dict[int, tuple[Path, Path]] = {}

    def of(self, case: Case) -> tuple[Path, Path]:
        """Return our package and the peer's."""
        if case.length not in self._made:
            self._made[case.length] = write_packages(self._folder, self._ids, case.length)
        return self._made[case.length]

    def live(self, case: Case) -> Path:
        """Return our package with rows that can be updated."""
        return write_live_package(self._folder, self._ids, case.length)


def measured(folder: Path, ids: int, rounds: int, calls: int, only: list[str]) -> Iterator[Row]:
    """Yield the rows of all cases."""
    packages, programs = Packages(folder, ids), Programs(folder)
    for case in PYTHON:
        if is_selected(only, case.name("Python"), PEER):
            yield from python_rows(case, packages.of(case), ids, rounds, calls)
    for case in CPP:
        if is_selected(only, case.name("C++"), PEER):
            yield from cpp_rows(case, programs, packages.of(case), ids, rounds, calls)
    if is_selected(only, f"{TWO_RUNNERS.name('Python')}, two runners", ONE_THREAD):
        yield two_runners_python(packages.of(TWO_RUNNERS)[0], ids, rounds, calls)
    if is_selected(only, f"{TWO_RUNNERS.name('C++')}, two runners", ONE_THREAD):
        yield two_runners_cpp(programs, packages.of(TWO_RUNNERS)[0], ids, rounds, calls)
    if is_selected(only, f"{BESIDE_A_WRITER.name('C++')}, rows updated", NO_UPDATES):
        live = packages.live(BESIDE_A_WRITER)
        yield from beside_a_writer(programs, live, ids, rounds, calls)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="of each table (default 100,000)")
    arguments.add_argument("--calls", type=positive, help="of a round (default 500)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    report = Report(as_json=options.json, cases=ROWS)
    ids = options.ids or (1000 if options.quick else 100_000)
    calls = options.calls or (20 if options.quick else 500)
    with tempfile.TemporaryDirectory() as folder:
        report.take(measured(Path(folder), ids, options.rounds, calls, options.only))
    report.close()


if __name__ == "__main__":
    main()
