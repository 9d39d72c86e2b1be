"""Requests of several clients in one run: tutorials/serving/batching.py and both servers."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from http_lifecycle import wait_for
from http_server import PYTHON_SERVER, ROOT, environment, running
from protocol_checks import metrics_of
from quick_packages import QUICK
from torch import Tensor, nn
from torch._inductor import config
from torch.export import Dim

import torch_dynemb as td
from torch_dynemb import serving
from tutorials.serving.batching import Batches
from tutorials.serving.client import Client, RefusedError

if TYPE_CHECKING:
    from conftest import Package

pytestmark = pytest.mark.cpu_only("packages are compiled for the CPU")

BATCH = serving.Size("batch", 1, 0, 0, None)


def fixed(size: int) -> serving.Size:
    return serving.Size(None, 0, size, size, size)


def tensor(name: str, dtype: torch.dtype, *sizes: serving.Size | None) -> serving.Input:
    return serving.Input(name, dtype, list(sizes), None)


class Rows:
    """In place of a package: rows of ids (L, batch), and their sum; one that has -1 is refused."""

    device = torch.device("cpu")

    def __init__(self, most: int | None = None) -> None:
        batch = BATCH._replace(most=most)
        length = serving.Size("length", 1, 0, 0, None)
        self.inputs = [
            tensor("ids", torch.int64, length, batch),
            tensor("shift", torch.float32, batch),
        ]
        self.outputs = [
            tensor("rows", torch.float32, batch, fixed(4)),
            tensor("sum", torch.float32, batch),
        ]
        self.weight = torch.randn(100, 4)
        self.ran: list[int] = []  # samples of each run

    def run_flat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        ids, shift = tensors
        self.ran.append(len(shift))
        if bool((ids < 0).any()):
            raise RuntimeError(f"the id {int(ids.min())} is below 0")
        rows = torch.nn.functional.embedding_bag(ids.T.contiguous(), self.weight, mode="sum")
        return [rows, rows.sum(1) + shift]


def request(samples: int, length: int = 3, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 100, (length, samples), generator=random)
    return [ids, torch.rand(samples, generator=random)]


def asked_at_once(batches: Batches, requests: Sequence[list[Tensor]]) -> list[Any]:
    """Outputs of requests, or their errors; each is asked for by a thread of its own."""

    def ask(of: list[Tensor]) -> Any:
        try:
            return batches.run_flat(of)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(ask, requests))


def assert_alone(model: Rows, requests: Sequence[list[Tensor]], found: Sequence[Any]) -> None:
    for of, outputs in zip(requests, found, strict=True):
        for part, expected in zip(outputs, model.run_flat(of), strict=True):
            assert torch.equal(part, expected)


def batches_of(model: Any, **options: Any) -> Batches:
    return Batches(model, **{"max_batch": 10, "max_delay_ms": 60_000, **options})


def test_requests_of_a_batch_get_their_own_answers() -> None:
    model = Rows()
    batches = batches_of(model)
    requests = [request(samples, seed=samples) for samples in (1, 2, 3, 4, 0)][::-1]
    found = asked_at_once(batches, requests[1:])
    assert (model.ran, batches.runs) == ([10], 1)  # as soon as it is full
    assert_alone(model, requests[1:], found)
    # neither is full, and their other sizes differ
    model.ran.clear()
    lengths = [request(1, length=length) for length in (2, 3, 2, 3)]
    found = asked_at_once(batches_of(model, max_batch=2), lengths)
    assert model.ran == [2, 2]
    assert_alone(model, lengths, found)


def test_large_requests_and_bounds_of_the_package() -> None:
    model = Rows(most=4)
    found = asked_at_once(batches_of(model), [request(2, seed=seed) for seed in range(4)])
    assert model.ran == [4, 4]
    assert_alone(model, [request(2, seed=seed) for seed in range(4)], found)
    model.ran.clear()
    batches_of(model).run_flat(request(4))  # waits for no other
    assert model.ran == [4]
    # what does not fit begins the next batch, and the one from before runs
    model.ran.clear()
    batches = batches_of(model, max_delay_ms=0)
    assert_alone(model, [request(3)], [batches.run_flat(request(3))])
    assert model.ran == [3, 3]


def test_a_batch_takes_requests_until_a_runner_is_free() -> None:
    model, entered, leave = Rows(), threading.Event(), threading.Event()
    run_flat = model.run_flat

    def waiting(tensors: Sequence[Tensor]) -> list[Tensor]:
        entered.set()
        assert leave.wait(60)
        return run_flat(tensors)

    model.run_flat = waiting  # type: ignore[method-assign]
    batches = batches_of(model, max_batch=7, max_delay_ms=0)
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(batches.run_flat, request(1))
        assert entered.wait(60)
        others = [threads.submit(batches.run_flat, request(2, seed=seed)) for seed in range(3)]
        wait_for(lambda: sum(of.samples for of in batches._open.values()) == 6)
        leave.set()
        found = [of.result() for of in (first, *others)]
    assert model.ran == [1, 6]
    model.run_flat = run_flat  # type: ignore[method-assign]
    assert_alone(model, [request(1), *(request(2, seed=seed) for seed in range(3))], found)


def test_a_refused_request_fails_alone() -> None:
    model = Rows()
    good, bad = [request(2, seed=seed) for seed in range(4)], request(2)
    bad[0][1, 1] = -7
    found = asked_at_once(batches_of(model), [*good, bad])
    assert_alone(model, good, found[:-1])
    assert str(found[-1]) == "the id -7 is below 0"
    # a wrong one does not join: two of them could make up for each other
    batches = batches_of(model, max_batch=6, max_delay_ms=0)
    for wrong, says in [
        ([request(2)[0], request(1)[1]], "'shift' has shape (1,), expected (batch), where"),
        ([request(2)[0].int(), request(2)[1]], "'ids' has dtype torch.int32"),
    ]:
        with pytest.raises((TypeError, ValueError), match=re.escape(says)):
            batches.run_flat(wrong)


def test_packages_without_a_batch_are_refused() -> None:
    ragged = Rows()
    ragged.inputs.append(tensor("offsets", torch.int64, BATCH._replace(plus=1)))
    with pytest.raises(ValueError, match="max_batch: the input 'offsets' has shape"):
        batches_of(ragged)
    for sizes, says in [
        ([fixed(1)], "the output 'sum' has shape (1), but"),
        ([BATCH._replace(times=2)], "the output 'sum' has shape (2 * batch), but"),
        ([BATCH._replace(plus=1)], "the output 'sum' has shape (batch + 1), but"),
        ([BATCH, BATCH], "the output 'sum' has shape (batch, batch), but"),
        ([BATCH, None], "the output 'sum' has shape (batch, any), but"),
        ([], "the output 'sum' has shape (), but"),
    ]:
        model = Rows()
        model.outputs[1] = tensor("sum", torch.float32, *sizes)
        with pytest.raises(ValueError, match=re.escape(f"max_batch: {says} requests are batched")):
            batches_of(model)
    model = Rows()
    with pytest.raises(ValueError, match=r"sizes \[\] in common"):
        batches_of(SimpleNamespace(inputs=[], outputs=[]))
    both = [BATCH, BATCH._replace(symbol="length")]
    model.inputs = [tensor("ids", torch.int64, *both)]
    model.outputs = [tensor("rows", torch.float32, *both)]
    with pytest.raises(ValueError, match=r"sizes \['batch', 'length'\] in common"):
        batches_of(model)


class Scored(nn.Module):
    """Pooled rows, and a dense layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = td.DynamicEmbeddingBag(8, mode="sum", name="ads", optimizer=td.SGD(lr=0.1))
        self.top = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.bag(ids)
        return pooled, self.top(pooled)


@pytest.mark.long
def test_the_server_runs_requests_together(live_package: Package, tmp_path: Path) -> None:
    model, folder = Scored(), tmp_path / "package"
    model.bag(torch.arange(100).reshape(50, 2)).sum().backward()  # these ids have a row now
    model.bag.optimizer.step()
    with config.patch(QUICK):
        ids = torch.arange(8).reshape(4, 2)
        serving.export(model, folder, (ids,), dynamic_shapes=({0: Dim("batch")},), version="monday")
    clients, samples = 4, 5
    asked = [torch.arange(10 * n, 10 * n + 2 * samples).reshape(samples, 2) for n in range(clients)]
    server = [*PYTHON_SERVER, folder, "--port", "0"]
    batching = ["--max-batch", str(clients * samples), "--max-delay-ms", "600000"]
    with serving.load(folder) as served:
        alone = [served.run(of)[0] for of in asked]
    with running([*server, *batching]) as port:

        def ask(ids: Tensor) -> dict[str, Any]:
            with Client(port) as client:
                return client.run({"ids": ids.tolist()})

        with pytest.raises(RefusedError, match="'ids' has shape"):
            ask(torch.zeros(1, 3, dtype=torch.int64))
        with ThreadPoolExecutor(clients) as threads:
            answers = list(threads.map(ask, asked))
        assert metrics_of(port)["dynemb_runs_total",] == 1
    dense = [of.detach().double() for of in (model.top.weight, model.top.bias)]
    for expected, answer in zip(alone, answers, strict=True):
        pooled, scores = map(torch.tensor, answer["outputs"])
        assert answer["version"] == "monday"
        assert torch.equal(pooled, expected)
        exact = nn.functional.linear(pooled.double(), *dense)
        torch.testing.assert_close(scores.double(), exact, rtol=0, atol=1e-6)
    for options, says in [
        (batching, "max_batch: the input 'features_u_1' has shape"),
        (["--max-delay-ms", "5"], "--max-delay-ms is given without --max-batch"),
    ]:
        command = [*PYTHON_SERVER, live_package.path, "--port", "0", *options]
        done = subprocess.run(
            command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (done.returncode != 0, says in done.stderr) == (True, True), done.stderr
