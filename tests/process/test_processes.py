"""Modules that go to other processes, and what a forked process has got from its parent."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("forks and processes of their own")

IDS = torch.arange(8)


def trained(dtype: torch.dtype = torch.float32) -> td.DynamicEmbedding:
    policy = td.Policy(score="frequency", admission=td.AdmitFrequent(2))
    module = td.DynamicEmbedding(
        4,
        optimizer=td.Adam(lr=0.1),
        policy=policy,
        dtype=dtype,
        eval_default=torch.ones(4),
        name="sent",
        max_rows=1000,
    )
    for _ in range(3):
        module(IDS).sum().backward()
        module.optimizer.param_groups[0]["lr"] = 0.25
        module.optimizer.step()
    return module


def train_and_return(module: td.DynamicEmbedding, results: Any) -> None:
    """In a child."""
    try:
        train(module)
        # plain bytes: tensors that a queue shares are gone with the process
        state = {name: tensor.tolist() for name, tensor in module.state_dict().items()}
        results.send((state, module.optimizer.state_dict()))
    except BaseException:
        results.send(traceback.format_exc())
        raise


def train(module: td.DynamicEmbedding) -> None:
    module(IDS + 4).sum().backward()
    module.optimizer.step()


@pytest.mark.long_cases("spawn")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_live_module_goes_to_another_process(method: str) -> None:
    module = trained()
    context = mp.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=train_and_return, args=(module, there))
    process.start()
    there.close()
    received = here.recv()
    process.join()
    assert process.exitcode == 0, received
    before = copy.deepcopy(module)
    train(module)
    state = {name: tensor.tolist() for name, tensor in module.state_dict().items()}
    assert received == (state, module.optimizer.state_dict())
    train(before)  # the parent's is its own
    assert all(map(torch.equal, before.state_dict().values(), module.state_dict().values()))


class Looked(Dataset[Tensor]):
    """Rows of ids, looked up by the workers of a DataLoader."""

    def __init__(self, module: td.DynamicEmbedding) -> None:
        self.module = module.eval()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            row: Tensor = self.module(torch.tensor([index]))[0]
        return row


@pytest.mark.long_cases("spawn")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_of_a_data_loader_look_ids_up(method: str) -> None:
    module = trained()
    loader = DataLoader(Looked(module), 8, num_workers=1, multiprocessing_context=method)
    assert torch.equal(torch.cat(list(loader)), module(torch.arange(16)).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pipes_carry_modules(dtype: torch.dtype) -> None:
    module = trained(dtype)
    here, there = mp.get_context("spawn").Pipe()
    sender = threading.Thread(target=here.send, args=(module,))  # more than fits into a pipe
    sender.start()
    received = there.recv()
    sender.join()
    assert all(map(torch.equal, received.state_dict().values(), module.state_dict().values()))
    train(received)
    assert received.group.steps == module.group.steps + 1


def test_pickle_and_deepcopy_are_as_before() -> None:
    module = trained()
    twins = [pickle.loads(pickle.dumps(module)), copy.deepcopy(module), module]
    for twin in twins:
        train(twin)
    for twin in twins:
        assert all(map(torch.equal, twin.state_dict().values(), module.state_dict().values()))


# -- forks ---------------------------------------------------------------------------------------


def in_fork(check: Callable[[], None]) -> None:
    """Runs a check in a forked child, in which pytest does not go on."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        report = b""
        try:
            check()
        except BaseException:
            report = traceback.format_exc().encode()
        os.write(write, report[-4000:])
        os._exit(0 if not report else 1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        report = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, report.decode()


CHANGES: dict[str, Callable[[td.DynamicEmbedding], object]] = {
    "forward": lambda m: m(IDS),
    "insert": lambda m: m.group.insert(0, IDS),
    "insert_or_assign": lambda m: m.group.insert_or_assign(0, IDS, torch.zeros(8, 4)),
    "erase": lambda m: m.group.erase(0, IDS),
    "remove": lambda m: m.group.remove(0, score_below=100),
    "clear": lambda m: m.group.clear(0),
    "fill": lambda m: m.group.fill(0, 1.0),
    "compact": lambda m: m.group.compact(),
    "reserve": lambda m: m.group.reserve(0, 100),
    "reset_counts": lambda m: m.group.reset_counts(0),
    "scores.set": lambda m: m.group.scores.set(0, IDS, IDS),
    "evicted.take": lambda m: m.group.evicted.take(),
    "load_state_dict": lambda m: m.load_state_dict(m.state_dict()),
    "set_optimizer": lambda m: m.set_optimizer(td.SGD(lr=0.1)),
    "optimizer.step": lambda m: m.optimizer.step(),
}


def test_a_forked_process_reads_tables_and_does_not_change_them() -> None:
    module = trained()
    expected = module.eval()(IDS).detach()
    state = module.state_dict()
    module.train()

    def check() -> None:
        for name, change in CHANGES.items():
            with pytest.raises(RuntimeError, match=r"this process is a fork .* make the module"):
                change(module)
            assert all(map(torch.equal, state.values(), module.state_dict().values())), name
        assert torch.equal(module.eval()(IDS), expected)
        assert module.group.usage.tables(wait=True)["sent"].size == 8
        assert len(list(module.group.export(0))) == 1

    in_fork(check)
    train(module)  # the parent's is as it was


def test_tables_that_a_forked_process_has_made_are_its_own() -> None:
    module = trained()

    def check() -> None:
        for own in (copy.deepcopy(module), trained()):
            train(own.train())
            own.set_optimizer(td.SGD(lr=0.1))
            train(own)
            own.group.compact()

    in_fork(check)


def test_split_gradients_are_not_applied_in_a_fork() -> None:
    module = td.DynamicEmbedding(4, optimizer=td.SGD(lr=1.0), split=True, max_rows=100)
    module(IDS).sum().backward()
    before = module.eval()(IDS).detach()

    def check() -> None:
        with pytest.raises(RuntimeError, match="this process is a fork"):
            module.optimizer.step()
        assert torch.equal(module(IDS), before)

    in_fork(check)
