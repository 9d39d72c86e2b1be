"""Memory of the process: no op leaks, deleted groups give it back, small tables stay small."""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from started import start_server
from torch._subclasses import FakeTensorMode

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import BUCKET_WIDTH, Meta
from torch_dynemb.storage import address_space
from torch_dynemb.storage.host import HostMemory
from torch_dynemb.table import allocation

pytestmark = pytest.mark.cpu_only("memory of the process")

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


def process_bytes(field: str) -> int:
    """A field of /proc/self/status, such as VmRSS or VmSize."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def resident() -> int:
    """Bytes of memory taken, without garbage and without what malloc keeps for later.

    Files and pages in swap do not count twice: the system takes and returns them when it likes.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return process_bytes("RssAnon") + process_bytes("VmSwap")


def two_tables() -> td.TableGroup:
    policy = td.Policy(score="step")
    tables = [td.TableConfig("a", 4, policy=policy), td.TableConfig("b", 8, policy=policy)]
    return td.TableGroup(tables, optimizer=td.Adam(lr=0.01))


Loop = Callable[[], None]


def index_loop() -> Loop:
    group = two_tables()
    ids, offsets = torch.arange(6), torch.tensor([0, 3, 6])

    def call() -> None:
        group.find_or_insert(ids, offsets, [0, 1])
        group.find(ids, offsets, [0, 1])
        group.erase(0, ids[:1])

    return call


def state_loop() -> Loop:
    group = two_tables()
    ids = torch.arange(6)
    for table in (0, 1):
        group.insert(table, ids)

    def call() -> None:
        group.materialize()
        ops.export_batch(group.index, table=0, begin=0, max_ids=8)

    return call


def inference_loop() -> Loop:
    embedding = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1)).eval()
    bag = td.DynamicEmbeddingBag(4, mode="mean", optimizer=td.SGD(lr=0.1)).eval()
    ids, weights = torch.arange(6).reshape(2, 3), torch.rand(2, 3)

    def call() -> None:
        embedding(ids)
        bag(ids, per_sample_weights=weights)

    return call


def embedding_training_loop() -> Loop:
    module = td.DynamicEmbedding(4, optimizer=td.Adagrad(lr=0.1))
    ids = torch.arange(6)

    def call() -> None:
        module(ids).sum().backward()
        module.optimizer.step()

    return call


def bag_training_loop() -> Loop:
    module = td.DynamicEmbeddingBagCollection(
        [td.TableConfig("a", 4), td.TableConfig("b", 8)], optimizer=td.Adam(lr=0.01)
    )
    weights = torch.rand(8, requires_grad=True)
    features = td.KeyedJagged(["a", "b"], torch.arange(8), torch.arange(0, 9, 2), weights)

    def call() -> None:
        module(features).sum().backward()
        module.optimizer.step()
        weights.grad = None

    return call


def errors_loop() -> Loop:
    """A call that raises frees what it has allocated."""
    group = two_tables()
    ids, offsets = torch.arange(6), torch.tensor([0, 3, 5])

    def call() -> None:
        with pytest.raises(RuntimeError):
            group.find_or_insert(ids, offsets, [0, 1])

    return call


LOOPS = [
    index_loop,
    state_loop,
    inference_loop,
    embedding_training_loop,
    bag_training_loop,
]


def growth_of(call: Loop, calls: int) -> int:
    """Bytes by which the process grows over ``calls`` calls: a leak does so in every round."""
    rounds = 4
    levels = []
    gc.freeze()  # what other tests have left is not looked through again
    for _ in range(rounds + 1):
        for _ in range(calls // rounds):
            call()
        levels.append(resident())
    gc.unfreeze()
    return rounds * min(after - before for before, after in itertools.pairwise(levels))


@pytest.mark.parametrize("loop", [*LOOPS, errors_loop], ids=lambda loop: loop.__name__)
def test_ops_do_not_leak(loop: Callable[[], Loop]) -> None:
    """A leak of 400 bytes a call shows; it takes the long test to see one of 10."""
    assert growth_of(loop(), 1_000) < 400_000


@pytest.mark.long
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_ops_do_not_leak_over_100_000_calls(loop: Callable[[], Loop]) -> None:
    assert growth_of(loop(), 100_000) < MIB


@pytest.mark.long
def test_a_deleted_group_gives_its_memory_back() -> None:
    """In a process of its own: what other tests have left in the heap would be used again."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = start_server().Process(target=report_errors, args=(use_and_delete_a_group, there))
    process.start()
    there.close()
    assert here.recv() == ""
    process.join()


def report_errors(check: Callable[[], None], told: Connection) -> None:
    """In a child: sends the traceback of a check, or nothing."""
    try:
        check()
    except BaseException:
        told.send(traceback.format_exc())
    else:
        told.send("")


def use_and_delete_a_group() -> None:
    def use() -> tuple[int, int]:
        module = td.DynamicEmbedding(64, optimizer=td.Adam(lr=0.1))
        for _ in range(2):
            module(torch.arange(60_000)).sum().backward()
        module.state_dict()
        return process_bytes("VmSize"), resident()

    use()
    before = resident()
    size_before = process_bytes("VmSize")
    size_during, during = use()
    after = resident()
    assert size_during - size_before > 1 << 30  # address space for far more rows than there are
    assert process_bytes("VmSize") - size_before < (size_during - size_before) // 100
    assert during - before > 43 * MIB  # rows and state are 43.9
    assert after - before < 4 * MIB


@pytest.mark.long
def test_groups_come_and_go() -> None:
    """More groups than the address space could hold at a time."""
    before = process_bytes("VmSize")
    for _ in range(300):
        module = td.DynamicEmbedding(8, optimizer=td.Adam(lr=0.1))
        module(torch.arange(10)).sum().backward()
        del module
    gc.collect()
    assert process_bytes("VmSize") - before < 1 << 30


@pytest.mark.long
def test_loading_and_copying_give_memory_back() -> None:
    module = td.DynamicEmbedding(8, optimizer=td.Adam(lr=0.1))
    module(torch.arange(100)).sum().backward()
    state = module.state_dict()

    def call() -> None:
        module.load_state_dict(state)
        state.update(module.state_dict())

    assert growth_of(call, 500) < 400_000


@pytest.mark.long
def test_many_small_tables_are_small() -> None:
    before = resident()
    modules = [td.DynamicEmbedding(16, optimizer=td.Adam(lr=0.1)) for _ in range(100)]
    for module in modules:
        module(torch.arange(10)).sum().backward()
    # a few pages for each of the tensors of a table
    assert resident() - before < 100 * 100 * 1024


@pytest.mark.long
def test_many_tables_of_one_group_are_small() -> None:
    before = resident()
    tables = [td.TableConfig(f"t{i}", 16) for i in range(200)]
    module = td.DynamicEmbeddingBagCollection(tables, optimizer=td.Adam(lr=0.1))
    module({f"t{i}": torch.arange(10)[None] for i in range(200)}).sum().backward()
    assert resident() - before < 200 * 16 * 1024 + MIB
    assert module.memory()["total"] < 200 * 10_000


@pytest.mark.long
def test_resident_memory_follows_the_ids() -> None:
    """Reserved memory is taken as ids come, and no growth keeps a second copy of the index."""
    module = td.DynamicEmbedding(32, optimizer=td.Adagrad(lr=0.1))
    module(torch.arange(1000)).sum().backward()
    before = resident()
    for begin in range(0, 400_000, 20_000):
        module(torch.arange(begin, begin + 20_000)).sum().backward()
        module.optimizer.step()
    used = module.memory()["total"]
    assert used > 100 * MIB
    assert resident() - before < 1.3 * used


def limited(program: str, *, left: int) -> str:
    """What a program prints that may reserve ``left`` bytes more than it has by then."""
    limit = (
        "import resource, torch, torch_dynemb as td\n"
        "torch.zeros(100, 100) @ torch.zeros(100, 100)\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        f"limit = pages * resource.getpagesize() + {left}\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", limit + program],
        env=environ,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.long
def test_tables_reserve_less_where_the_process_is_limited() -> None:
    output = limited(
        "tables = [td.DynamicEmbedding(16, optimizer=td.Adam(lr=0.1)) for _ in range(30)]\n"
        "for table in tables:\n"
        "    table(torch.arange(1000)).sum().backward()\n"
        "print(*(table.group.rows.weights[0].shape[0] for table in tables))\n"
        "try:\n"
        "    td.DynamicEmbedding(16, optimizer=td.Adam(lr=0.1), max_rows=10**9)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n",
        left=4 << 30,
    )
    rows, error = output.splitlines()
    assert min(map(int, rows.split())) > 30_000
    assert int(rows.split()[0]) > 3_000_000
    assert "could not reserve" in error
    for part in ("bytes of addresses", "RLIMIT_AS", "ulimit -v unlimited", "max_rows", "capacity"):
        assert part in error


def strict_overcommit(path: str) -> str:
    if path == "/proc/sys/vm/overcommit_memory":
        return "2\n"
    if path == "/proc/meminfo":
        return "MemTotal: 9 kB\nCommitLimit:    3000000 kB\nCommitted_AS:   1000000 kB\n"
    return Path(path).read_text()


def test_tables_reserve_less_where_reserved_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "read_text", strict_overcommit)
    before = process_bytes("VmSize")
    table = td.DynamicEmbedding(16, optimizer=td.Adam(lr=0.1))
    assert table.group.rows.weights[0].shape[0] > 10_000
    assert process_bytes("VmSize") - before < 2_000_000 * 1024 // 2
    (limit,) = address_space.address_limits()
    assert limit.left == 2_000_000 * 1024
    with pytest.raises(RuntimeError) as raised:
        td.DynamicEmbedding(4096, optimizer=td.Adam(lr=0.1), max_rows=(1 << 35) - 1)
    assert "could not reserve" in str(raised.value)
    assert "2048000000 bytes: set it to 0 or 1 (sysctl vm.overcommit_memory" in str(raised.value)


def test_an_error_names_the_limit_of_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/self/maps": "map\n" * 100, "/proc/sys/vm/max_map_count": "105\n"}
    monkeypatch.setattr(address_space, "read_text", lambda path: files.get(path, ""))
    assert "100 mappings of memory, and vm.max_map_count is 105" in address_space.what_ran_out(1)
    files["/proc/sys/vm/max_map_count"] = "65530\n"
    assert "addresses of the process have run out" in address_space.what_ran_out(1)


def test_counts_of_a_table_with_a_capacity_reserve_what_it_may_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HostMemory, "total_bytes", lambda self: 64 << 40)
    sizes = {}
    for capacity in (None, 1000, 10_000_000):
        policy = td.Policy(capacity=capacity, admission=td.AdmitFrequent(2))
        group = td.TableGroup([td.TableConfig("t", 4, policy=policy)], optimizer=None)
        sizes[capacity] = BUCKET_WIDTH * int(group.index.meta[1, Meta.REGION_BUCKETS])
        assert group.index.buckets.shape[0] == int(group.index.meta[:, Meta.REGION_BUCKETS].sum())
    assert (1 << 26) < sizes[1000] < 1 << 30
    assert 640_000_000 < sizes[10_000_000] < sizes[None] // 4


@pytest.mark.long
@pytest.mark.parametrize("memory", [None, 2 << 40], ids=["this machine", "2 TiB"])
def test_a_thousand_modules_in_one_process(
    monkeypatch: pytest.MonkeyPatch, memory: int | None
) -> None:
    if memory is not None:
        monkeypatch.setattr(HostMemory, "total_bytes", lambda self: memory)
    policy = td.Policy(admission=td.AdmitFrequent(2))
    modules = [
        td.DynamicEmbedding(2, optimizer=td.AMSGrad(lr=0.1), split=True, policy=policy)
        for _ in range(1000)
    ]
    for module in modules:
        module(torch.tensor([1, 1, 2])).sum().backward()
        module.optimizer.step()
    assert all(len(module) == 1 for module in modules)
    assert all(module.group.rows.weights[0].shape[0] > 10**7 for module in modules)
    del module, modules
    gc.collect()  # other tests ask how many addresses are left


@pytest.mark.long
def test_a_thousand_tables_fit_into_the_addresses_of_a_large_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one column with everything that reserves most; a tensor for all of memory each was 20."""
    monkeypatch.setattr(HostMemory, "total_bytes", lambda self: 2 << 40)
    # without the groups of other tests of this process
    monkeypatch.setattr(allocation, "_reserved", weakref.WeakKeyDictionary())
    policy = td.Policy(admission=td.AdmitFrequent(2))
    groups = [
        td.TableGroup(
            [td.TableConfig("t", 1, policy=policy)], optimizer=td.AMSGrad(lr=0.1), split=True
        )
        for _ in range(300)
    ]
    rows = [group.rows.weights[0].shape[0] for group in groups]
    assert rows[0] > 10**9
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] > 10**7
    tables = [td.TableConfig(f"t{dim}", dim) for dim in range(1, 27)]
    collection = td.TableGroup(tables, optimizer=td.Adam(lr=0.1), split=True)
    assert all(weights.shape[0] > 10**6 for weights in collection.rows.weights)
    del groups, collection
    gc.collect()
    alone = td.TableGroup([td.TableConfig("t", 64)], optimizer=td.Adam(lr=0.1))
    assert alone.rows.weights[0].shape[0] > 10**9


@pytest.mark.long
def test_tables_freed_in_the_midst_of_a_trace_are_freed(tmp_path: Path) -> None:
    """The garbage collector runs there, too, and modes of the trace see the ops that it calls."""
    store = td.SSDStore(tmp_path, cache=10)
    for _ in range(2):  # the path is free again
        before = process_bytes("VmSize")
        trained, stored = (
            td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), storage=storage)
            for storage in (None, store)
        )
        for module in (trained, stored):
            module(torch.arange(6)).sum().backward()
        reserved = process_bytes("VmSize") - before
        with FakeTensorMode():
            del module, trained, stored
            gc.collect()
        assert process_bytes("VmSize") - before < reserved / 10
