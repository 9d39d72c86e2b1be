"""CPU time of the job behind `make train` on two ranks and on one, with dynamic and static tables.

User and system time of all processes together: of the steps after a warm-up, and of the whole
program. The latter begins at its start (imports, launcher, model, all steps), without reading
files, checkpoints and evaluation. The limit is the time of TorchRec's own static tables (FBGEMM,
fused, with row numbers of a vocabulary) on two ranks, against one rank. Programs take turns; each
runs in fresh processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common.command import is_selected, parser, positive
from common.cpu_time import run_counted
from common.report import Report, Row, compare
from common.timing import Timing, interleave_rounds

sys.path.append(str(Path(__file__).resolve().parents[1]))

from whole_job.on_ranks import ALONE, Job
from whole_job.samples import make_vocabulary

from tutorials.dlrm.job.planted import CHUNK, PlantedConfig, PlantedModel

BENCH = "two_ranks"
HERE = Path(__file__).resolve().parent
TARGET = 1.5
PARTS = ("steps", "whole")


class Program(NamedTuple):
    """Variant of the job: tables and ranks; :data:`ALONE` is one process without TorchRec."""

    dynamic: bool
    ranks: int

    def __str__(self) -> str:
        tables = "dynamic" if self.dynamic else "static"
        if self.ranks == ALONE:
            return f"{tables}, one process without TorchRec"
        return f"{tables}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"


OURS = Program(dynamic=True, ranks=2)
STATIC = Program(dynamic=False, ranks=2)
COMPARISONS = {
    (OURS, Program(dynamic=True, ranks=ALONE)): TARGET,
    (OURS, Program(dynamic=True, ranks=1)): None,
    (STATIC, Program(dynamic=False, ranks=1)): None,
    (OURS, STATIC): None,
}


def case_of(program: Program, part: str) -> str:
    return f"CPU time, {part}: {program}"


def save_samples(folder: Path, count: int, divisor: float) -> list[int]:
    """Write the first samples of the job and their vocabulary; return its sizes.

    Args:
        divisor: as in :class:`tutorials.dlrm.job.planted.PlantedConfig`.
    """
    import torch

    config = PlantedConfig(max(count, PlantedConfig.samples), cardinality_divisor=divisor)
    drawn = PlantedModel(config).draw(0, -(-count // CHUNK) * CHUNK)
    ids = np.ascontiguousarray(drawn.ids[:, :count])
    vocabulary = make_vocabulary(torch.from_numpy(ids))
    arrays = {"ids": ids, "labels": drawn.labels[:count], "integers": drawn.integers[:count]}
    for name, values in (arrays | {"rows": vocabulary.rows.numpy()}).items():
        np.save(folder / f"{name}.npy", values)
    return vocabulary.sizes


class Runs:
    """Runner of programs, which keeps the CPU time of their steps.

    Args:
        job: what each trains, but for tables and ranks.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._steps: dict[Program, list[float]] = {}

    def whole_ms(self, program: Program) -> float:
        """Return milliseconds of the CPUs that a run takes."""
        job = self._job._replace(dynamic=program.dynamic, ranks=program.ranks)
        command = [sys.executable, "-m", "whole_job.on_ranks", json.dumps(job._asdict())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # only the first round compiles Python
        ended = run_counted(command, HERE, environment)
        per_step = json.loads(ended.output) / (job.steps - job.warmup) * 1e3
        self._steps.setdefault(program, []).append(per_step)
        return ended.seconds * 1e3

    def steps(self, program: Program) -> Timing:
        """Return milliseconds of the CPUs that a step took, by run."""
        return Timing(tuple(self._steps[program]))


def measured(job: Job, rounds: int, only: list[str]) -> Iterator[Row | str]:
    wanted = {
        (part, *pair): target
        for part in PARTS
        for pair, target in COMPARISONS.items()
        if is_selected(only, case_of(pair[0], part), str(pair[1]))
    }
    programs = {program for _, *pair in wanted for program in pair}
    if not programs:
        return
    yield "runs"
    runs = Runs(job)
    whole = interleave_rounds(
        {str(p): lambda _, p=p: runs.whole_ms(p) for p in sorted(programs)},  # type: ignore[misc]
        rounds=rounds,
        warmup=0,
    )
    for (part, program, peer), target in wanted.items():
        timings = runs.steps if part == "steps" else lambda p: whole[str(p)]
        yield compare(
            BENCH,
            case_of(program, part),
            timings(program),
            str(peer),
            timings(peer),
            target=target,
            batch=job.batch,
            steps=job.steps - job.warmup if part == "steps" else job.steps,
        )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=positive, help="of a run (default 200)")
    options = arguments.parse_args()
    for package in ("torchrec", "fbgemm_gpu"):
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"{package} is not installed: `make bench` installs the peers")
    steps = options.steps or (6 if options.quick else 200)
    batch = 128 if options.quick else 2048
    divisor = 1000 if options.quick else PlantedConfig.cardinality_divisor
    report = Report(as_json=options.json, cases=len(PARTS) * len(COMPARISONS))
    with tempfile.TemporaryDirectory() as folder:
        sizes = save_samples(Path(folder), steps * batch, divisor)
        job = Job(
            dynamic=True,
            ranks=ALONE,
            sizes=sizes,
            batch=batch,
            steps=steps,
            warmup=steps // 10,
            folder=folder,
        )
        report.take(measured(job, options.rounds, options.only))
    report.close()


if __name__ == "__main__":
    main()
