"""A trainer that is killed goes on from its last commit: no event is lost, none counts twice."""

from __future__ import annotations

import os
import random
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from resumed_training import EVERY_STEPS, Model, expected_counts, train
from started import start_server

from torch_dynemb.delta_log import resume

pytestmark = pytest.mark.cpu_only("is about files, which know no device")


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    return start_server()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    model = train(tmp_path_factory.mktemp("undisturbed") / "log", lambda _: None)
    assert model.counted() == expected_counts()
    return model.everything()


def trained(path: Path, told: Connection, kill_at: int, workers: int) -> None:
    train(path, told.send, kill_at, workers)


def trained_by(path: Path, told: Connection, workers: int) -> None:
    told.send(train(path, lambda _: None, workers=workers).everything())


def undisturbed_by(server: ForkServerContext, path: Path, workers: int) -> list[Any]:
    """Train in a process of its own: worker processes have an order of events of their own."""
    receive, send = server.Pipe(duplex=False)
    process = server.Process(target=trained_by, args=(path, send, workers))
    process.start()
    send.close()
    everything: list[Any] = receive.recv()
    process.join()
    return everything


def killed(
    server: ForkServerContext, path: Path, *, steps: int = -1, kill_at: int = 0, workers: int = 0
) -> bool:
    """Train in a process that is killed. Return whether it has ended before."""
    receive, send = server.Pipe(duplex=False)
    process = server.Process(target=trained, args=(path, send, kill_at, workers))
    process.start()
    send.close()
    try:
        while receive.recv() != steps:
            pass
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    except EOFError:
        pass  # it has ended, or has killed itself
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def check(path: Path, undisturbed: list[Any]) -> None:
    """Training goes on to the end with the bits of undisturbed training."""
    model = train(path, lambda _: None)
    assert model.counted() == expected_counts()
    assert model.everything() == undisturbed


def kill_by_steps(
    server: ForkServerContext, path: Path, times: int, draw: random.Random, workers: int
) -> None:
    """Kill processes some steps after they have begun."""
    for _ in range(times):
        if killed(server, path, steps=draw.randrange(1, 4 * EVERY_STEPS), workers=workers):
            return


def test_a_killed_trainer_goes_on(
    server: ForkServerContext, tmp_path: Path, undisturbed: list[Any]
) -> None:
    kill_by_steps(server, tmp_path / "log", 2, random.Random(1), 0)
    check(tmp_path / "log", undisturbed)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_trainer_that_is_killed_again_and_again_goes_on(
    server: ForkServerContext, tmp_path: Path, workers: int
) -> None:
    undisturbed = undisturbed_by(server, tmp_path / "undisturbed", workers)
    for seed in range(12):
        kill_by_steps(server, tmp_path / str(seed), 20, random.Random(seed), workers)
        check(tmp_path / str(seed), undisturbed)


@pytest.mark.parametrize("kill_at", [30, 57])
def test_a_trainer_killed_at_a_call_of_the_file_system_goes_on(
    server: ForkServerContext, tmp_path: Path, undisturbed: list[Any], kill_at: int
) -> None:
    assert not killed(server, tmp_path / "log", kill_at=kill_at)
    check(tmp_path / "log", undisturbed)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_trainer_killed_at_every_call_of_the_file_system_goes_on(
    server: ForkServerContext, tmp_path: Path, undisturbed: list[Any]
) -> None:
    points = 0
    while not killed(server, tmp_path / str(points), kill_at=points + 1):
        check(tmp_path / str(points), undisturbed)
        points += 1
    assert points > 100


def test_what_is_read_beside_training_is_one_step(tmp_path: Path, undisturbed: list[Any]) -> None:
    """The commit's rows, counts and position of the reader are of one moment."""
    path, seen = tmp_path / "log", []

    def read(number: int) -> None:
        if number % 7 == 6:
            model = Model()
            state = resume(path, model).state
            if state is not None:
                position = state["loader"]["_num_yielded"]
                seen.append((sum(model.counted().values()), position))

    train(path, read)
    assert len(seen) > 5
    assert all(events == 8 * batches for events, batches in seen)
