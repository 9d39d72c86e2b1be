"""Parallel execution: the same integers with any number of threads, and work for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from collisions import bucket_of, first_hashes, ids_in_first_buckets, ids_in_one_bucket
from execution import cpu_seconds_by_thread, threads
from group_calls import call_of, differences, same_bits, snapshot
from oracle import Oracle
from seeding import seeded
from started import start_server
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import Table
from torch_dynemb.table.state import check

pytestmark = pytest.mark.cpu_only("threads of the CPU")

COUNT = 1_000_000
SIZES = [2047, 2048, 4096, 4097, 60_000]  # around what one thread does alone, and tiles of ids


def make_group(max_rows: int, *, score: Any = "step") -> td.TableGroup:
    policy = td.Policy(score=score)
    tables = [
        td.TableConfig(name, dim, policy=policy) for name, dim in (("a", 4), ("b", 4), ("c", 8))
    ]
    return td.TableGroup(tables, optimizer=None, max_rows=max_rows, seed=9)


def index_history(count: int, size: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """State and results after insertions, erasures and growths on ``count`` threads."""
    generator = seeded(1)

    def some(table_range: int) -> list[int]:
        return torch.randint(-table_range, table_range, (size,), generator=generator).tolist()

    group = make_group(max_rows=4 * size + 1000)
    results = []
    with threads(count):
        for step in range(4):
            group.index.clock[0].fill_(step)
            call = call_of(group, [(0, [some(size)]), (1, [some(size // 2)]), (2, [some(50)])])
            results.append(group.find_or_insert(call.ids, call.offsets, call.tables))
            results += group.find(call.ids.flip(0), call.offsets, call.tables)
            for table in range(3):
                group.erase(table, torch.tensor(some(size)[: size // 2]))
            group.reserve(1, size * step // 2)
        results += [part for t in range(3) for batch in group.export(t) for part in batch]
    return snapshot(group), results


@pytest.mark.parametrize("size", SIZES)
def test_integers_do_not_depend_on_threads(size: int) -> None:
    (one, one_results), (two, two_results) = (index_history(n, size) for n in (1, 2))
    assert differences(one, two) == []
    assert all(same_bits(a, b) for a, b in zip(one_results, two_results, strict=True))


@pytest.mark.parametrize("count", [1, 2])
def test_large_calls_equal_the_oracle(count: int) -> None:
    """Rows in order of first occurrence over the features of a call, ids repeated within and
    between them, with erased rows taken up again."""
    group = make_group(max_rows=100_000)
    oracle = Oracle(group)
    generator = seeded(3)
    for step in range(3):
        features = [
            (table, torch.randint(15_000 + 5000 * step, (9000,), generator=generator).tolist())
            for table in (2, 0, 1, 0)
        ]
        call = call_of(group, [(table, [ids]) for table, ids in features])
        with threads(count):
            handles = group.find_or_insert(call.ids, call.offsets, call.tables)
        assert handles.tolist() == oracle.find_or_insert(features)
        gone = torch.randint(20_000, (6000,), generator=generator)
        assert group.erase(0, gone) == oracle.erase(0, gone.tolist())
    assert group.index.tables[:, Table.BUCKET_COUNT].tolist() == oracle.buckets


def crowded_ids(group: td.TableGroup, kind: str) -> Tensor:
    """10^6 ids for 1/64 of the buckets of table 0, or for one bucket."""
    generator = seeded(2)
    if kind == "distinct":
        ids = ids_in_first_buckets(group, 0, COUNT, buckets=1, bucket_count=64)
        return ids[torch.randperm(COUNT, generator=generator)]
    ids = ids_in_one_bucket(group, 0, 40, bucket_count=64)
    return ids[torch.randint(40, (COUNT,), generator=generator)]


def cpu_seconds_of_insertion(kind: str, ids_per_call: int) -> list[float]:
    """Processor time of each thread for inserting 10^6 ids into few buckets."""
    group = make_group(max_rows=COUNT, score="none")
    ids = crowded_ids(group, kind)
    group.insert(2, torch.arange(100_000))  # starts the threads
    before = cpu_seconds_by_thread()
    handles = torch.cat([group.insert(0, part) for part in ids.split(ids_per_call)])
    after = cpu_seconds_by_thread()
    assert torch.equal(group.insert(0, ids), handles)
    assert group.size(0) == len(ids.unique())
    if kind == "distinct":
        assert torch.equal(handles, torch.arange(COUNT) << 28 | 1)
    return sorted(after[thread] - before.get(thread, 0.0) for thread in after)


def send_cpu_seconds(pipe: Connection, kind: str, ids_per_call: int) -> None:
    torch.set_num_threads(2)
    pipe.send(cpu_seconds_of_insertion(kind, ids_per_call))


# Where all ids share a range of first buckets, one thread places what fits there.
@pytest.mark.parametrize(
    ("kind", "ids_per_call", "least_share"),
    [("distinct", COUNT, 0.01), ("distinct", 50_000, 0.01), ("repeated", 50_000, 0.2)],
)
def test_both_threads_work_on_crowded_buckets(
    kind: str, ids_per_call: int, least_share: float
) -> None:
    """Run in a process with threads that sleep while they wait: processor time is work."""
    server = start_server()
    ours, theirs = server.Pipe()
    process = server.Process(target=send_cpu_seconds, args=(theirs, kind, ids_per_call))
    process.start()
    theirs.close()  # so that the end of the process ends the pipe
    seconds = ours.recv()
    process.join()
    assert seconds[-2] > least_share * sum(seconds), seconds


def test_few_buckets_are_few() -> None:
    group = make_group(max_rows=1000)
    ids = ids_in_first_buckets(group, 0, 100_000, buckets=1, bucket_count=64)
    assert len(ids.unique()) == len(ids)
    assert bucket_of(first_hashes(group, 0, ids), 64 * 5).max() < 5


# -- two trainers --------------------------------------------------------------------------------


def refused_of_two(call: Callable[[int, int], object], calls: int) -> list[list[str]]:
    """Calls ``call(thread, number)`` from two threads at once; the errors, "" for none."""
    start = threading.Barrier(2)
    errors: list[list[str]] = [[], []]

    def run(thread: int) -> None:
        start.wait()
        for number in range(calls):
            try:
                call(thread, number)
                errors[thread].append("")
            except RuntimeError as error:
                errors[thread].append(str(error))

    both = [threading.Thread(target=run, args=(thread,)) for thread in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    return errors


def test_of_two_threads_that_insert_one_is_refused_before_it_changes_anything() -> None:
    group = make_group(max_rows=2_000_000)
    some = 20_000

    def ids(thread: int, number: int) -> Tensor:
        return torch.arange(some) + some * (2 * number + thread)

    errors = refused_of_two(lambda *which: group.insert(0, ids(*which)), 30)
    inserted = 0
    for thread, of_thread in enumerate(errors):
        for number, error in enumerate(of_thread):
            there = group.contains(0, ids(thread, number))
            assert bool((there == (error == "")).all())
            assert error == "" or "find_or_insert_: another thread is changing" in error
            inserted += some * (error == "")
    assert group.size(0) == inserted > 0
    check(group.tables, group.state.tensors())


@pytest.mark.parametrize("split", [False, True])
def test_two_threads_that_train_a_module_leave_it_sound(split: bool) -> None:
    module = td.DynamicEmbedding(8, optimizer=td.Adam(lr=0.1), split=split, max_rows=200_000)

    def step(thread: int, number: int) -> None:
        first = 1500 * (2 * number + thread)
        module(torch.arange(first, first + 2000)).sum().backward()
        module.optimizer.step()

    errors = refused_of_two(step, 30)
    for error in [error for of_thread in errors for error in of_thread if error != ""]:
        assert "another thread is changing" in error or "were updated between" in error
    check(module.group.tables, module.group.state.tensors())
    module(torch.arange(100)).sum().backward()
    module.optimizer.step()
