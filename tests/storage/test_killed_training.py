"""A process that is killed while it trains on stored rows leaves a snapshot that is whole."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
from contextlib import nullcontext
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from started import start_server
from stored_training import StoredModel, on_a_gpu, train

from torch_dynemb import checkpoint

pytestmark = pytest.mark.cpu_only("stores on disks are the CPU's")

STEPS = 18
SAVE_AT = (2, 3, 5, 8, 11, 13)
MESSAGES = 24  # of one snapshot, about: its calls of the file system


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    return start_server()


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[str], torch.Tensor]:
    """Losses, and the values at the end, of training without a break."""
    model = StoredModel(None)
    return model.train_steps(STEPS), model.values()


def trained(path: Path, gpu: bool, told: Connection) -> None:
    with on_a_gpu() if gpu else nullcontext():
        train(path, STEPS, SAVE_AT, told.send)


def killed(server: ForkServerContext, path: Path, gpu: bool, messages: int) -> list[str]:
    """What a process has told until it was killed, after so many messages, or has ended."""
    receive, send = server.Pipe(duplex=False)
    process = server.Process(target=trained, args=(path, gpu, send))
    process.start()
    send.close()
    told: list[str] = []
    try:
        while len(told) < messages:
            told.append(receive.recv())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        while True:
            told.append(receive.recv())
    except EOFError:
        pass
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return told


def check(path: Path, told: list[str], undisturbed: tuple[list[str], torch.Tensor]) -> int:
    """The last reported snapshot is there, or the next one; training goes on from it."""
    losses, values = undisturbed
    saved = max((int(of.split()[1]) for of in told if of.startswith("saved")), default=0)
    model = StoredModel(path)
    names = checkpoint.snapshots(model)
    assert bool(names) or saved == 0
    if names:
        steps = model.load()
        assert steps in (saved, *[of for of in SAVE_AT if of > saved][:1])
    begin = model.steps
    assert model.train_steps(STEPS - begin) == losses[begin:]
    assert torch.equal(model.values(), values)
    return begin


def kill_and_check(
    server: ForkServerContext,
    folder: Path,
    undisturbed: tuple[list[str], torch.Tensor],
    times: int,
    draw: random.Random,
    *,
    gpu: bool,
) -> None:
    """Kills processes at random moments, each of which goes on from where the last one was."""
    shutil.rmtree(folder, ignore_errors=True)
    reached = 0
    for _ in range(times):
        told = killed(server, folder, gpu, draw.randrange(1, 4 * MESSAGES))
        already = [f"saved {reached}"] if reached > 0 else []
        with on_a_gpu() if gpu else nullcontext():
            reached = check(folder, [*already, *told], undisturbed)
        if reached == SAVE_AT[-1]:
            shutil.rmtree(folder)
            reached = 0


Undisturbed = tuple[list[str], torch.Tensor]


@pytest.mark.long
@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_training_goes_on_after_kills(
    gpu: bool, server: ForkServerContext, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    times = 2 if gpu else 3
    kill_and_check(server, tmp_path / "rows", undisturbed, times, random.Random(1), gpu=gpu)


@pytest.mark.long
@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_training_goes_on_after_many_kills(
    gpu: bool, server: ForkServerContext, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    kill_and_check(server, tmp_path / "rows", undisturbed, 200, random.Random(2), gpu=gpu)


def try_to_open(path: Path, say: Connection) -> None:
    try:
        StoredModel(path)
        say.send("")
    except RuntimeError as error:
        say.send(str(error))


def test_a_directory_belongs_to_one_process(server: ForkServerContext, tmp_path: Path) -> None:
    model = StoredModel(tmp_path)
    receive, send = server.Pipe(duplex=False)
    process = server.Process(target=try_to_open, args=(tmp_path, send))
    process.start()
    said = receive.recv()
    process.join()
    assert f"path {tmp_path} is in use by process {os.getpid()}" in said
    with pytest.raises(RuntimeError, match=rf"in use by process {os.getpid()} \(this one\)"):
        StoredModel(tmp_path)
    model.step()
    del model
    with (tmp_path / "LOCK").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
