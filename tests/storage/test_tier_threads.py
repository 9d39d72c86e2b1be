"""Lookups of tiered tables: by the process that made them, in one of its threads at a time."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from record_dict import RecordDict
from tiered_pairs import STORES, storage_of
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.storage.tiers import Storage

pytestmark = pytest.mark.cpu_only("forks and threads of their own; stores are of the CPU")

FORK = "this process is a fork of the one that made the tables"
IDS = torch.arange(400)


def trained(storage: Storage) -> td.DynamicEmbedding:
    table = td.DynamicEmbedding(
        4, name="t", optimizer=td.SGD(lr=0.5), storage=storage, max_rows=4096
    )
    for batch in IDS.split(50):
        table(batch).sum().backward()
        table.optimizer.step()
    return table


def all_rows(table: td.DynamicEmbedding) -> Tensor:
    """Of all ids; in memory are those of the last ones alone."""
    rows = torch.cat([table.eval()(batch) for batch in IDS.split(50)])
    table.optimizer.step()  # the cache has its intended size
    return rows.clone()


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


@pytest.mark.parametrize("kind", STORES)
def test_a_forked_process_is_told_that_it_has_no_store(kind: str, tmp_path: Path) -> None:
    table = trained(storage_of(kind, tmp_path))
    expected = table.eval()(IDS).clone()
    table.train()

    def check() -> None:
        for call in (
            lambda: table(IDS),
            lambda: table.eval()(IDS),
            lambda: table.prefetch(IDS),
            lambda: table.optimizer.step(),
        ):
            with pytest.raises(RuntimeError, match=FORK):
                call()

    in_fork(check)
    assert torch.equal(table.eval()(IDS), expected)  # here it goes on


class LooksUp(torch.utils.data.Dataset[Tensor]):
    """Looks ids up where a DataLoader asks for them."""

    def __init__(self, table: td.DynamicEmbedding) -> None:
        self.table = table

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return self.table(torch.tensor([index])).detach()


def test_a_forked_worker_of_a_loader_is_told(tmp_path: Path) -> None:
    table = trained(storage_of("threads", tmp_path)).eval()
    loader = torch.utils.data.DataLoader(
        LooksUp(table), num_workers=1, multiprocessing_context="fork"
    )
    batches: Any = iter(loader)
    with pytest.raises(RuntimeError, match=rf"(?s){FORK}.*give them td\.freeze\(model\)"):
        next(batches)
    batches._shutdown_workers()  # the error has it: the garbage collector waits five seconds
    assert table(IDS).shape == (400, 4)


def test_a_forked_process_that_lets_the_table_go_ends(tmp_path: Path) -> None:
    """It does not wait for the thread of the store, which it has not."""
    tables = [trained(storage_of("threads", tmp_path))]

    def check() -> None:
        tables.clear()

    in_fork(check)
    tables[0](IDS[:50]).sum().backward()
    tables[0].optimizer.step()


class Waits(RecordDict):
    """A store that is slow: a read ends when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = False
        self.entered, self.let_go = threading.Event(), threading.Event()

    def read(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        if self.waits:
            self.entered.set()
            assert self.let_go.wait(60)
        return super().read(table, ids, out)


def test_two_threads_in_one_cache() -> None:
    """What a lookup wants is on its way while another thread looks up."""
    store = Waits()
    table = trained(td.ExternalStore(store, cache="64 rows"))
    expected = all_rows(table)
    store.waits = True
    results: list[Tensor] = []
    other = threading.Thread(target=lambda: results.append(table(IDS[:50])))
    other.start()
    assert store.entered.wait(60)
    try:
        with pytest.raises(RuntimeError, match="another thread"):
            table(IDS[:50])
    finally:
        store.let_go.set()
        other.join()
    assert torch.equal(results[0], expected[:50])
    assert torch.equal(table(IDS), expected)


def test_threads_that_look_up_at_once_are_refused_or_right(tmp_path: Path) -> None:
    """By one file store; no lookup returns rows of another id."""
    table = trained(storage_of("threads", tmp_path))
    expected = all_rows(table)
    wrong: list[object] = []
    refused = [0]

    def look_up(first: int) -> None:
        for k in range(60):
            ids = (torch.arange(60) + 37 * k + first) % 400
            try:
                if not torch.equal(table(ids), expected[ids]):
                    wrong.append(ids)
            except RuntimeError as error:
                refused[0] += 1
                if "another thread" not in str(error):
                    wrong.append(error)

    threads = [threading.Thread(target=look_up, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert refused[0] < 120
    assert torch.equal(table(IDS), expected)
