"""The DLRM job while ranks are killed, and machines leave and return: nothing is lost or repeated.

Each of its ids has a count of its occurrences. All counts are compared with the data at each start.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import elastic_job
import pytest
from elastic_job import RANKS, Files, Moment
from job_steps import job_of_one_process
from started import start_server
from torch.distributed import TCPStore

from tutorials.dlrm.job.generate import generate
from tutorials.dlrm.job.planted import PlantedConfig

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

BATCH, STEPS, EVERY = 64, 90, 3
ALL = sum(RANKS.values())


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = BATCH * STEPS * 10 // 9  # a tenth is held out
    return generate(PlantedConfig(samples=lines), tmp_path_factory.mktemp("samples")).path


def command(samples: Path, *more: str) -> list[str]:
    # counts of occurrences, and room for all ids
    policy = ["--capacity", "200000", "--eviction", "lfu"]
    model = ["--embedding-dim", "8", "--threads", "1", "--log-every", "1", "--optimizer", "adagrad"]
    return [str(samples), "--batch-size", str(BATCH), *model, *policy, *more]


def moments(kills: int, seed: int, calls: int) -> list[Moment]:
    """Draw moments: of a machine, of a rank beside the others, of a rank of all, and so on.

    Half of them are in saves.

    Args:
        kills: number of moments.
        seed: of the moments.
        calls: of the file system, of which a save on a rank has at least so many.
    """
    draw = random.Random(seed)
    drawn = []
    for number, step in enumerate(sorted(draw.sample(range(1, STEPS - 2 * EVERY), kills))):
        ranks, victim = ((ALL, draw.randrange(ALL)), (ALL, -1), (ALL - 1, draw.randrange(ALL - 1)))[
            number % 3
        ]
        where = ("save", "step", "save", "forward")[number % 4]
        drawn.append(Moment(ranks, step, where, draw.randint(1, calls), victim))
    return drawn


def run(folder: Path, arguments: list[str], moments: list[Moment]) -> dict[str, Any]:
    """Run the job on both machines; start the second one again where the others wait for it."""
    files = Files(folder)
    os.mkfifo(files.waiting)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context = start_server()

    @contextmanager
    def started(machine: str) -> Iterator[Any]:
        process = context.Process(
            target=elastic_job.agent, args=(folder, machine, store.port, arguments, moments)
        )
        process.start()
        try:
            yield process
        finally:
            process.terminate()  # which ends its ranks, too
            process.join()

    pipe = os.open(files.waiting, os.O_RDWR)
    try:
        with started("first") as first:
            over = False
            while not over:
                with started("second") as second:
                    while first.is_alive() and wait([first.sentinel, pipe]) == [pipe]:
                        os.read(pipe, 1024)
                        if not second.is_alive():
                            break
                    over = not first.is_alive()
                    second.join()
            first.join()
            assert first.exitcode == 0
    finally:
        os.close(pipe)
    result: dict[str, Any] = json.loads(files.result.read_text())
    return result


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("saves", "calls", "kills"),
    [
        (f"--checkpoint-every {EVERY}", 12, 20),
        (f"--checkpoint-every {EVERY} --async-checkpoint --sharding column_wise", 12, 6),
        (f"--checkpoint-every {4 * EVERY} --commit-every {EVERY}", 4, 20),
    ],
)
def test_ranks_are_killed_again_and_again(
    samples: Path, tmp_path: Path, saves: str, calls: int, kills: int
) -> None:
    chosen = moments(kills, 1, calls)
    assert {moment.where for moment in chosen} == {"step", "forward", "save"}
    arguments = command(samples, *saves.split())
    result = run(tmp_path, arguments, chosen)
    files = Files(tmp_path)
    assert files.killed() == kills
    lives = [line.split() for line in files.lives.read_text().splitlines()]
    assert {good for _, _, good in lives} == {"True"}
    steps = [int(step) for _, step, _ in lives]
    assert steps == sorted(steps)
    assert all(step % EVERY == 0 for step in steps)
    assert {int(ranks) for ranks, _, _ in lives} >= {ALL - 1, ALL}  # torchrun may begin with fewer
    whole, points = job_of_one_process([*command(samples), "--out", str(tmp_path / "whole")])
    assert result["ids"] == whole["ids"]
    assert result["evicted"] == 0
    assert len(result["points"]) == STEPS
    for (samples_so_far, loss, _), expected in zip(result["points"], points, strict=True):
        assert samples_so_far == expected.samples
        assert loss == pytest.approx(expected.loss, abs=1e-5)
    assert result["auc"] == pytest.approx(whole["auc"], abs=2e-3)
