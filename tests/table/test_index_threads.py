"""Parallel execution: the same integers with any number of threads, and work for all of them."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
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
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import live_readers

import torch_dynemb as td
from torch_dynemb.ops import memory
from torch_dynemb.ops.columns import Table
from torch_dynemb.table.changes import record_changes
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
@pytest.mark.long_cases("distinct-1000000-0.01", "distinct-50000-0.01")
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


# -- changes of several steps ---------------------------------------------------------------------


def in_another_thread(call: Callable[[], object]) -> Exception | None:
    """Its error."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


IDS = torch.arange(50)
CHANGES: dict[str, Callable[[td.DynamicEmbeddingCollection], object]] = {
    "compact": lambda module: module.group.compact(),
    "erase": lambda module: module.group.erase(0, IDS[:5]),
    "remove": lambda module: module.group.remove(0, predicate=lambda ids, _: ids < 9),
    "clear": lambda module: module.group.clear(0),
    "fill": lambda module: module.group.fill(0, 1.0),
    "reset_counts": lambda module: module.group.reset_counts(1),
    "insert": lambda module: module.group.insert(0, IDS + 7),
    "insert_or_assign": lambda module: module.group.insert_or_assign(0, IDS, torch.ones(50, 4)),
    "materialize": lambda module: module.group.materialize(),
    "reserve": lambda module: module.group.reserve(0, 5000),
    "scores": lambda module: module.group.scores.set(0, IDS, IDS, score="step"),
    "state": lambda module: module.group.state.load(module.group.state.tensors()),
    "add_table": lambda module: module.add_table(td.TableConfig("c", 4)),
    "set_optimizer": lambda module: module.set_optimizer(td.Adam(lr=0.1)),
    "evicted.record": lambda module: module.group.evicted.record(10),
    "evicted.take": lambda module: module.group.evicted.take(),
    "record_changes": lambda module: record_changes(module.group.tables, "follower", scores=False),
    "forward": lambda module: module({"a": (IDS + 9)[:, None], "b": IDS[:, None]}),
}
MODULES: dict[str, Callable[[], Any]] = {
    "rows": lambda: td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1)),
    "bags": lambda: td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1)),
}


def trained_collection() -> td.DynamicEmbeddingCollection:
    policy = td.Policy(score="step")
    counted = td.Policy(score="step", admission=td.AdmitFrequent(3))
    tables = [td.TableConfig("a", 4, policy=policy), td.TableConfig("b", 4, policy=counted)]
    module = td.DynamicEmbeddingCollection(tables, optimizer=td.SGD(lr=0.1), max_rows=10_000)
    outputs = module({"a": IDS[:, None], "b": IDS[:, None]})
    sum(of.sum() for of in outputs.values()).backward()
    module.optimizer.step()
    module.group.erase(0, IDS[::3])
    return module


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_beside_one_of_several_steps_is_refused_before_anything(change: str) -> None:
    module = trained_collection()
    call = CHANGES[change]
    before = snapshot(module.group)
    with module.group.tables.changing():
        error = in_another_thread(lambda: call(module))
        assert isinstance(error, td.errors.InUseError), error
        assert "another thread is changing this table" in str(error)
    assert differences(before, snapshot(module.group)) == []
    assert in_another_thread(lambda: call(module)) is None


def test_a_backward_beside_a_change_of_several_steps_is_refused() -> None:
    module = trained_collection()
    output = module({"a": IDS[:, None], "b": IDS[:, None]})["a"]
    before = snapshot(module.group)
    with module.group.tables.changing():
        error = in_another_thread(output.sum().backward)
        assert "another thread is changing this table" in str(error)
    assert differences(before, snapshot(module.group)) == []


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_beside_a_change_that_moves_rows_raises_the_class(kind: str) -> None:
    module = MODULES[kind]()
    for training in (True, False):
        module.train(training)
        with module.group.tables.changing(moves_rows=True):
            error = in_another_thread(lambda: module(IDS[:, None]))
            assert isinstance(error, td.errors.InUseError), error
            assert error.tables == ("embedding",)


class Compacted(TorchDispatchMode):
    """Has another thread give ids of a group other rows before one op of this thread."""

    def __init__(self, group: td.TableGroup, before: int) -> None:
        super().__init__()
        self._group, self.before = group, before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if self.before == 0:
            assert in_another_thread(lambda: self._group.erase(0, IDS[:30])) is None
            assert in_another_thread(self._group.compact) is None
        self.before -= 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reads", ["group", "module"])
def test_rows_beside_a_compaction_are_those_of_their_ids(reads: str) -> None:
    last, values = IDS[40:], IDS[:, None].expand(-1, 4).float()
    for before in range(10):
        module = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), max_rows=100).eval()
        module.group.insert_or_assign(0, IDS, values)
        with Compacted(module.group, before) as mode:
            read = module.group.read(0, last) if reads == "group" else module(last)
        assert torch.equal(read, values[40:])
    assert mode.before > 0  # it came before each op


def test_a_frozen_copy_beside_a_compaction_is_whole_or_refused() -> None:
    last, values = IDS[40:], IDS[:, None].expand(-1, 4).float()
    refused, before, mode = 0, 0, None
    while mode is None or mode.before < 0:  # it came before each op
        module = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), max_rows=100)
        module.group.insert_or_assign(0, IDS, values)
        with Compacted(module.group, before) as mode:
            try:
                assert torch.equal(td.freeze(module)(last), values[40:])
            except td.errors.InUseError:
                refused += 1
        before += 1
    assert 0 < refused < before


def test_ctrl_c_at_a_lock_releases_it(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(1000)
    lock = memory._lock

    def interrupted(*arguments: Any) -> None:
        lock(*arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(memory, "_lock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.compact()
    monkeypatch.undo()
    assert in_another_thread(group.compact) is None


@pytest.mark.parametrize("moves_rows", [False, True])
def test_lookups_beside_a_change_are_refused_if_it_moves_rows(moves_rows: bool) -> None:
    group = make_group(1000)
    group.insert(0, IDS)
    rows = group.read(0, IDS)
    calls = [
        lambda: group.read(0, IDS),
        lambda: group.contains(0, IDS),
        lambda: group.scores.get(0, IDS),
    ]
    with group.tables.changing(moves_rows=moves_rows):
        assert torch.equal(group.read(0, IDS), rows)  # of the thread that changes
        errors = [in_another_thread(call) for call in calls]
    if not moves_rows:
        assert errors == [None] * len(calls)
    for error in errors if moves_rows else ():
        assert isinstance(error, td.errors.InUseError)
        assert "cannot be read now: call again afterwards" in str(error)
    assert [in_another_thread(call) for call in calls] == [None] * len(calls)


def test_a_change_is_refused_beside_another_and_lets_it_go_on() -> None:
    group = make_group(1000)
    with group.tables.changing(), group.tables.changing(moves_rows=True):
        assert isinstance(in_another_thread(group.compact), td.errors.InUseError)
        group.insert(0, IDS)
        assert group.erase(0, IDS[:20]) == 20
        group.compact()
    assert in_another_thread(group.compact) is None
    assert group.contains(0, IDS).tolist() == [False] * 20 + [True] * 30


def test_compaction_beside_training_loses_no_id() -> None:
    policy = td.Policy(score="step", capacity=3000)
    module = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), policy=policy)
    generator = seeded(1)
    batches = torch.randint(6000, (60, 1000), generator=generator)

    def step(number: int) -> None:
        module(batches[number]).sum().backward()
        module.optimizer.step()

    def change(thread: int, number: int) -> object:
        while True:
            with suppress(td.errors.InUseError):
                return step(number) if thread == 0 else module.group.compact()

    assert refused_of_two(change, 60) == [[""] * 60] * 2
    ids = module.ids()
    found = module.group.contains(0, torch.arange(6000))
    assert len(ids) == len(ids.unique()) == module.group.size(0) == int(found.sum()) > 0
    check(module.group.tables, module.group.state.tensors())


# -- readers beside the trainer -------------------------------------------------------------------


def test_a_reader_beside_the_trainer_misses_no_id() -> None:
    """While the index grows, ids leave it, and others take their slots."""
    lasting = torch.arange(500) * 7919
    module = td.DynamicEmbedding(4, optimizer=td.SGD(lr=1.0), eval_default="zeros")
    values = (torch.arange(500) + 1.0)[:, None].expand(-1, 4).contiguous()
    module.group.insert_or_assign(0, lasting, values)
    stop, wrong = threading.Event(), []

    def read() -> None:
        with torch.no_grad():
            while not stop.is_set():
                rows = module(lasting)
                if not torch.equal(rows, values):
                    wrong.append(rows)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(60):
        new = torch.arange(2000) + 10**7 + 2000 * step
        module.group.insert(0, new)
        module.group.erase(0, new[::2])
    stop.set()
    reader.join()
    assert not wrong
    assert module.group.usage.tables()["embedding"].growths > 5


@pytest.mark.long
def test_a_bucket_is_read_as_it_was_at_some_time() -> None:
    """Under ThreadSanitizer, beside a thread that changes its slots."""
    seen = live_readers.printed(live_readers.build(live_readers.PROBES, sanitized=True), 60_000)
    assert seen.pop("reads") > 0
    assert not any(seen.values()), seen
