"""Compiled models that are served: p50 and p99 of a call, against nn.EmbeddingBag's.

Eight tables, D=16, three dense layers, one thread; uniform ids, all of them known. Both models are
packages of AOTInductor; ours is called through serving.load, or the C++ reader, with its checks.
"""

from __future__ import annotations

import io
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from common.command import is_selected, parser, positive
from common.report import Report, Row, compare
from common.timing import Timing, interleave_rounds
from served.models import batch, id_of, write_packages

import torch_dynemb as td

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from tutorials.serving.compile_command import compile_command  # noqa: E402

BENCH = "serving"
PEER = "nn.EmbeddingBag, AOTI"


class Case(NamedTuple):
    """A size of requests.

    Attributes:
        batch, length: samples, and ids of each feature in one.
        target: largest ratio of medians that is wanted.
    """

    batch: int
    length: int
    target: float | None


PYTHON = (Case(1, 1, None), Case(256, 1, 1.2), Case(256, 20, 1.5))
CPP = (Case(1, 1, 0.5), Case(256, 1, 1.2), Case(256, 20, 1.5))


class Calls:
    """Calls that are timed one by one.

    Args:
        run: the call.
        count: calls of a round.
    """

    def __init__(self, run: Callable[[], object], count: int) -> None:
        self._run, self._count = run, count
        self.rounds: list[list[float]] = []

    def __call__(self, number: int) -> float:
        taken = []
        for _ in range(self._count):
            begin = time.perf_counter()
            self._run()
            taken.append(1e3 * (time.perf_counter() - begin))
        self.rounds.append(taken)
        return statistics.median(taken)


def percentile_99(rounds: list[list[float]]) -> Timing:
    """The 99th percentile of each round."""
    return Timing(
        tuple(statistics.quantiles(taken, n=100, method="inclusive")[98] for taken in rounds)
    )


def rows_of(
    case: Case, language: str, ours: list[list[float]], peer: list[list[float]]
) -> Iterator[Row]:
    """Rows of p50 and p99 from the milliseconds of calls, round by round."""
    name = f"{language}, B={case.batch} L={case.length}"
    half = [Timing(tuple(map(statistics.median, rounds))) for rounds in (ours, peer)]
    yield compare(BENCH, f"{name}, p50", half[0], PEER, half[1], target=case.target)
    most = [percentile_99(rounds) for rounds in (ours, peer)]
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
    case: Case, program: Path, packages: tuple[Path, Path], ids: int, rounds: int, calls: int
) -> Iterator[Row]:
    rows = list(batch(ids, case.batch, case.length, 1).values())
    inputs = program.with_name("inputs.pt")
    saved = io.BytesIO()
    torch.save(([id_of(row) for row in rows], rows), saved)
    inputs.write_bytes(saved.getvalue())
    ops = Path(td.__file__).with_name("_C.abi3.so")
    command = [program, *packages, ops, inputs, str(rounds), str(calls)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    taken: dict[str, list[list[float]]] = {"ours": [], "static": []}
    for line in printed.splitlines():
        name, *times = line.split()
        taken[name].append([float(value) / 1e3 for value in times])
    yield from rows_of(case, "C++", taken["ours"], taken["static"])


def measured(folder: Path, ids: int, rounds: int, calls: int, only: list[str]) -> Iterator[Row]:
    """All cases; packages and the program are made when the first one wants them."""
    packages: dict[int, tuple[Path, Path]] = {}
    program: Path | None = None
    for language, case in itertools.chain(
        (("Python", case) for case in PYTHON), (("C++", case) for case in CPP)
    ):
        if not is_selected(only, f"{language}, B={case.batch} L={case.length}", PEER):
            continue
        if case.length not in packages:
            packages[case.length] = write_packages(folder, ids, case.length)
        made = packages[case.length]
        if language == "Python":
            yield from python_rows(case, made, ids, rounds, calls)
            continue
        if program is None:
            program = folder / "packages"
            source = Path(__file__).parent / "served" / "packages.cpp"
            subprocess.run(compile_command(program, source), check=True)
        yield from cpp_rows(case, program, made, ids, rounds, calls)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="of each table (default 100,000)")
    arguments.add_argument("--calls", type=positive, help="of a round (default 500)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    report = Report(as_json=options.json, cases=2 * (len(PYTHON) + len(CPP)))
    ids = options.ids or (1000 if options.quick else 100_000)
    calls = options.calls or (20 if options.quick else 500)
    with tempfile.TemporaryDirectory() as folder:
        report.take(measured(Path(folder), ids, options.rounds, calls, options.only))
    report.close()


if __name__ == "__main__":
    main()
