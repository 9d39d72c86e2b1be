"""Memory of groups on the emulated GPU: mapping, running out, captured steps, reported errors."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated_groups import different_state, emulated_cuda
from emulator.build import build
from emulator.mode import (
    Graph,
    calls_behind,
    created_bytes,
    fault,
    forbidden_calls,
    launches,
    library,
    set_calls_behind,
    set_capturing,
    set_capturing_elsewhere,
    set_memory_limit,
)
from group_calls import bag_lookup, call_of, flat_call, train
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import Slab, Table
from torch_dynemb.storage import cuda

pytestmark = pytest.mark.own_device

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_limit_after_a_test() -> Iterator[None]:
    gc.collect()
    yield
    set_memory_limit(None)
    set_capturing(False)
    set_calls_behind(0)


def make_group(
    dim: int = 64, tables: int = 1, score: Any = "none", **arguments: Any
) -> td.TableGroup:
    policy = td.Policy(score=score)
    configs = [td.TableConfig(f"table{t}", dim, policy=policy) for t in range(tables)]
    with emulated_cuda():
        return td.TableGroup(configs, **{"optimizer": td.Adam(lr=0.1), "seed": 1, **arguments})


def counts(group: td.TableGroup) -> list[Tensor]:
    return [group.index.tables[:, : Table.FOUND].clone(), group.index.slabs.clone()]


def assert_refused_on_device(
    group: td.TableGroup, call: Callable[[], object], message: str
) -> None:
    """Runs a call in which a kernel finds an error; the end of the step must raise it, once."""
    before = counts(group)
    with emulated_cuda():
        call()
        with pytest.raises(RuntimeError, match=message):
            group.end_step()
        group.end_step()
    assert all(torch.equal(a, b) for a, b in zip(before, counts(group), strict=True))


# -- mapping -----------------------------------------------------------------------------------


@pytest.mark.long
def test_memory_is_mapped_as_ids_arrive_and_given_back() -> None:
    start = created_bytes()
    group = make_group(tables=2)
    empty = created_bytes() - start
    assert empty <= 24 * MIB  # pages of 2 MiB: two indexes
    with emulated_cuda():
        group.insert(0, torch.arange(50_000))
    rows = 50_000 * (64 * 4 * 3 + 4)
    grown = created_bytes() - start - empty
    assert rows <= grown + empty <= 1.5 * rows + 64 * MIB
    with emulated_cuda():
        group.insert(0, torch.arange(50_000))  # known ids: the bound of the last call is met
        del group
        gc.collect()
    assert created_bytes() == start


def test_a_step_without_growth_maps_nothing_and_launches_less() -> None:
    group = make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(30_000))
        before, mapped = launches(), created_bytes()
        group.insert(0, torch.arange(100))  # fits into the index whatever is new
        without_growth = launches() - before
        group.insert(0, torch.arange(30_000))  # might not
        with_growth = launches() - before - without_growth
    assert created_bytes() <= mapped + 100 * MIB
    assert without_growth + 3 == with_growth


def test_repeated_ids_that_would_not_fit_if_all_were_new() -> None:
    """The bound cannot be mapped, so the new ids are counted; two hundred of them fit."""
    group = make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(1000))
        set_memory_limit(created_bytes() + 24 * MIB)
        handles = group.insert(0, torch.arange(1000, 1200).repeat(1000))
    assert group.size(0) == 1200
    assert handles.unique().numel() == 200


def test_out_of_memory_in_growth_changes_nothing() -> None:
    group = make_group(score="step")
    with emulated_cuda():
        group.insert(0, torch.arange(1000))
        before = counts(group)
        set_memory_limit(created_bytes() + 24 * MIB)
        message = r"find_or_insert_: out of GPU memory: .* no id was inserted. Call torch.cuda"
        with pytest.raises(torch.OutOfMemoryError, match=message) as raised:
            group.insert(0, torch.arange(500, 200_000))
        assert type(raised.value) is td.errors.DeviceMemoryError
        assert raised.value.tables == tuple(group.names)
        assert all(torch.equal(a, b) for a, b in zip(before, counts(group), strict=True))
        assert bool(group.contains(0, torch.arange(1000)).all())
        assert not bool(group.contains(0, torch.arange(1000, 200_000)).any())
        train(group, 0, torch.arange(900, 1100), torch.ones(200, 64))
        assert group.size(0) == 1100
        set_memory_limit(None)
        group.insert(0, torch.arange(500, 100_000))
    assert group.size(0) == 100_000


@pytest.mark.parametrize("frees", [True, False])
def test_memory_that_torch_caches_is_taken_before_a_call_fails(
    monkeypatch: pytest.MonkeyPatch, frees: bool
) -> None:
    calls = []

    def empty_cache() -> None:
        calls.append(group.size(0))
        set_memory_limit(None if frees else created_bytes())

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "LIBRARY", build())
    group = make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(1000))
        share = cuda.share_cached_memory.__wrapped__
        function = share()  # as the memory of a GPU does when it is made
        try:
            set_memory_limit(created_bytes() + 24 * MIB)
            if frees:
                group.insert(0, torch.arange(100_000))
            else:
                with pytest.raises(torch.OutOfMemoryError):
                    group.insert(0, torch.arange(100_000))
        finally:
            library().dynemb_set_empty_cache(None)
    assert function is not None
    assert calls == [1000]
    assert group.size(0) == (100_000 if frees else 1000)


def test_results_that_do_not_fit_into_memory_are_out_of_memory_too() -> None:
    """2^46 bytes: torch's own allocator refuses them, on the CPU as on a GPU."""
    rows, positions = torch.ones(1, 2**14), torch.zeros(2**20, dtype=torch.int64)
    offsets = torch.arange(2**10 + 1) * 2**10
    message = r"ragged_tile: out of GPU memory: the call needs 67108865 MiB .*empty_cache"
    with emulated_cuda(), pytest.raises(torch.OutOfMemoryError, match=message):
        ops.ragged_tile(rows, positions, offsets, features=1, tile_lens=[2**20])


def test_reserving_more_than_the_region_is_refused_at_once() -> None:
    group = make_group(max_rows=100)
    with emulated_cuda():
        before = created_bytes()
        with pytest.raises(RuntimeError, match=r"needs 4\d\d buckets .* larger max_rows"):
            group.reserve(0, 1200)
    assert created_bytes() == before


def test_a_state_moves_between_devices() -> None:
    config = [td.TableConfig("table0", 64, policy=td.Policy(score="step"))]
    cpu = td.TableGroup(config, optimizer=td.Adam(lr=0.1), seed=1)
    train(cpu, 0, torch.arange(5000), torch.ones(5000, 64))
    cpu.erase(0, torch.arange(100))
    group, back = make_group(score="step"), td.TableGroup(config, optimizer=td.Adam())
    with emulated_cuda():
        group.state.load(cpu.state.tensors())
        assert different_state(cpu, group) == []
        train(group, 0, torch.arange(4000, 9000), torch.ones(5000, 64))
        state = group.state.tensors()
    train(cpu, 0, torch.arange(4000, 9000), torch.ones(5000, 64))
    back.state.load(state)
    assert different_state(cpu, back) == []


def test_reserved_tensors_that_no_one_bound() -> None:
    with emulated_cuda():
        buckets = torch.ops.dynemb.reserve_cuda([64, 8], 2, 0)
        tables = torch.zeros(1, 16, dtype=torch.int64)
        meta = torch.zeros(1, 16, dtype=torch.int64)
        scores = torch.zeros(0, 4, dtype=torch.int64)
        with pytest.raises(RuntimeError, match=r"grow_: buckets is reserved .*: call bind_group"):
            torch.ops.dynemb.grow_(buckets, scores, tables, meta, 0, 10)


# -- what calls might need, and do not -----------------------------------------------------------


ROW = 64 * 4 * 3 + 4 + 8  # bytes of weights, Adam's state, generation and entry of the free list


def test_the_host_does_not_map_ahead_of_a_device_that_is_behind() -> None:
    group = make_group()
    ids = torch.arange(50_000)
    with emulated_cuda():
        group.insert(0, ids)
        start = created_bytes()
        set_calls_behind(7)
        for _ in range(8):
            group.insert(0, ids)  # all of them known, which the host does not
    assert calls_behind() == 1  # it has waited for the others
    assert created_bytes() - start <= 2.3 * len(ids) * (ROW + 32)


def test_a_host_with_enough_memory_mapped_does_not_wait() -> None:
    group = make_group()
    ids = torch.arange(1000)
    with emulated_cuda():
        group.insert(0, torch.arange(5000))
        group.insert(0, ids)
        group.end_step()
        set_calls_behind(7)
        for _ in range(7):
            group.insert(0, ids[:10])
    assert calls_behind() == 7


@pytest.mark.long
def test_memory_that_no_step_needs_is_given_back() -> None:
    group = make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(120_000) % 1000)
        mapped = created_bytes()
        for _ in range(200):
            group.insert(0, torch.arange(100))
            group.end_step()
        assert mapped - created_bytes() >= 60_000 * ROW
        values = group.read(0, torch.arange(1000))
        train(group, 0, torch.arange(20_000), torch.ones(20_000, 64))  # takes some of it again
        assert group.size(0) == 20_000
        assert not torch.equal(group.read(0, torch.arange(1000)), values)


def test_memory_that_was_asked_for_is_not_given_back() -> None:
    group = make_group()
    with emulated_cuda():
        group.reserve(0, 5_000_000)  # an index of 115 MB
        mapped = created_bytes()
        for _ in range(200):
            group.insert(0, torch.arange(100))
            group.end_step()
        assert created_bytes() >= mapped


def insert_features(group: td.TableGroup, ids: list[Tensor]) -> Tensor:
    """Table t gets ``ids[t]``, in one call."""
    offsets = torch.tensor([0, *(len(part) for part in ids)]).cumsum(0)
    return group.find_or_insert(torch.cat(ids), offsets, list(range(len(ids))))


def test_a_small_table_in_a_large_batch_does_not_grow_for_all_of_it() -> None:
    group = make_group(tables=2)
    large, small = torch.arange(30_000), torch.arange(10)
    with emulated_cuda():
        group.reserve(0, 100_000)
        insert_features(group, [large, small])
        before = launches()
        insert_features(group, [large, small])
        with_block = launches() - before
        group.insert(0, large[:10])
        without_growth = launches() - before - with_block
        # one block instead of three kernels: table 1 might get 30,000 ids, but never had
        assert with_block == without_growth + 1
        grown = int(group.index.tables[1, Table.GROWTHS])
        insert_features(group, [large[:100], torch.arange(20_000)])  # now it does, and grows
    cpu = td.TableGroup(group.config.tables, optimizer=td.Adam(lr=0.1), seed=1)
    cpu.reserve(0, 100_000)
    for ids in ([large, small], [large, small], [large[:10]], [large[:100], torch.arange(20_000)]):
        insert_features(cpu, ids)
    assert int(group.index.tables[1, Table.GROWTHS]) == grown + 1
    assert different_state(cpu, group) == []


def test_replays_have_room_for_the_ids_of_each_table_not_for_all_ids() -> None:
    group = make_group(tables=8)
    ids = [torch.arange(20_000), *(torch.arange(50) for _ in range(7))]
    with emulated_cuda():
        insert_features(group, ids)
        start = created_bytes()
        set_capturing(True)
        insert_features(group, ids)
        set_capturing(False)
        assert created_bytes() - start <= 3.5 * 20_350 * ROW + 64 * MIB
        rooms = [int(n) * 4 * 70 // 100 for n in group.index.tables[:, Table.BUCKET_COUNT]]
        assert rooms[0] >= 4 * 20_000
        assert all(4 * 50 <= room < 2_000 for room in rooms[1:])


# -- tables that end -----------------------------------------------------------------------------


@pytest.mark.long
def test_a_table_that_ends_in_a_capture_does_not_invalidate_it() -> None:
    start = created_bytes()
    group, other = make_group(), make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(5000))
        other.insert(0, torch.arange(10))
        before = forbidden_calls()
        set_capturing(True)
        del group
        gc.collect()
        set_capturing(False)
        assert forbidden_calls() == before
        held = created_bytes()
        other.end_step()
        assert created_bytes() <= held - 5000 * ROW
        del other
        gc.collect()
    assert created_bytes() == start


def test_a_table_that_ends_while_another_thread_captures_gives_its_memory_back() -> None:
    """A wait for the device would invalidate the capture, and the memory would be lost."""
    start = created_bytes()
    group = make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(5000))
        before = forbidden_calls()
        set_capturing_elsewhere(True)
        del group
        gc.collect()
        set_capturing_elsewhere(False)
    assert forbidden_calls() == before
    assert created_bytes() == start


# -- captured steps ------------------------------------------------------------------------------


def test_a_captured_call_makes_room_for_replays_first() -> None:
    group = make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(1000))
        buckets = int(group.index.tables[0, Table.BUCKET_COUNT])
        set_capturing(True)
        group.insert(0, torch.arange(1000, 3000))
        set_capturing(False)
        room = int(group.index.tables[0, Table.BUCKET_COUNT]) * 4 * 70 // 100
        assert buckets * 4 * 70 // 100 < 3000 < 1000 + 3 * 2000 <= room
        # eager calls and steps go on from there, and each step looks ahead again
        for step in range(4):
            group.insert(0, torch.arange(3000 + step * 2000, 5000 + step * 2000))
            group.end_step()
        room = int(group.index.tables[0, Table.BUCKET_COUNT]) * 4 * 70 // 100
        assert room >= group.size(0) + 3 * 2000
        assert bool(group.contains(0, torch.arange(11_000)).all())


def test_a_step_is_refused_in_a_capture_and_ends_after_every_replay() -> None:
    """Events of a capture cannot be waited for, so a captured step would break a later one."""
    group, graph = make_group(), Graph()
    ids = torch.arange(2000)
    with emulated_cuda():
        group.insert(0, ids)
        before = group.rows.row_clock.clone(), forbidden_calls()
        with graph.capture():
            group.insert(0, ids)
            for step in (group.step, group.end_step):
                with pytest.raises(RuntimeError, match="outside of the CUDA graph, after every re"):
                    step()
        assert (group.steps, forbidden_calls()) == (0, before[1])
        assert torch.equal(group.rows.row_clock, before[0])
        for replay in range(1, 8):
            ids += 2000
            graph.replay()
            group.step()
            assert group.size(0) == 2000 * (replay + 1)
    assert group.steps == 7
    assert forbidden_calls() == before[1]


def test_replays_without_steps_refuse_new_ids_and_the_next_step_says_so() -> None:
    group, graph = make_group(), Graph()
    ids = torch.arange(2000)
    with emulated_cuda():
        with graph.capture():
            group.insert(0, ids)
        for _ in range(40):
            ids += 2000
            graph.replay()
        held = group.index.tables[0, Table.SIZE].item()
        assert held == 3 * 2000  # the capture has run once, here
        with pytest.raises(td.errors.NoRoomError, match=r"step\(\) after every replay"):
            group.step()
        group.step()
        graph.replay()
        group.step()
        assert group.size(0) == held + 2000
        assert bool((group.find_or_insert(ids, torch.tensor([0, 2000]), [0]) >= 0).all())


def test_a_replay_does_not_use_what_has_been_freed() -> None:
    group, graph = make_group(), Graph()
    with emulated_cuda():
        ids = torch.arange(100)
        with graph.capture():
            group.insert(0, ids)
        graph.replay()
        del ids
        with pytest.raises(AssertionError, match=r"uses freed arguments of .*find_or_insert_"):
            graph.replay()


def test_a_captured_call_without_memory_for_replays_is_refused() -> None:
    group = make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(1000))
        set_memory_limit(created_bytes() + 24 * MIB)
        set_capturing(True)
        message = "room for the replays of a captured step takes"
        with pytest.raises(torch.OutOfMemoryError, match=message):
            group.insert(0, torch.arange(1000, 30_000))
        set_capturing(False)
        assert group.size(0) == 1000


# -- errors that a kernel finds ------------------------------------------------------------------


def insert_with(group: td.TableGroup, offsets: list[int]) -> Callable[[], object]:
    ids = torch.arange(100, 104)
    return lambda: group.find_or_insert(ids, torch.tensor(offsets), [0, 0])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2, 4], r"find_or_insert_: offsets\[0\] is 1, expected 0"),
        ([0, 3, 2, 2, 4], r"find_or_insert_: offsets\[2\] is less than the offset before it"),
        ([0, 2, 5], r"find_or_insert_: the last offset is 5, expected the number of ids"),
    ],
)
def test_wrong_offsets(offsets: list[int], message: str) -> None:
    group = make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(10))
    assert_refused_on_device(group, insert_with(group, offsets), message)


def test_a_full_table() -> None:
    group = make_group(max_rows=100)
    with emulated_cuda():
        group.insert(0, torch.arange(90))
    handles = []
    assert_refused_on_device(
        group,
        lambda: handles.append(group.insert(0, torch.arange(80, 120))),
        r"find_or_insert_: row slab 0 has no room .* no id was inserted.*larger max_rows",
    )
    assert bool((handles[0][:10] >= 0).all())
    assert bool((handles[0][10:] == -1).all())


def test_writing_into_a_full_table() -> None:
    group = make_group(dim=4, max_rows=100)
    with emulated_cuda():
        group.insert_or_assign(0, torch.arange(90), torch.ones(90, 4))
        with pytest.raises(RuntimeError, match="row slab 0 has no room"):
            group.insert_or_assign(0, torch.arange(80, 120), torch.zeros(40, 4))
        assert torch.equal(group.read(0, torch.arange(90)), torch.ones(90, 4))
    assert group.size(0) == 90


def test_an_update_whose_forward_saw_other_rows() -> None:
    group = make_group(dim=4)
    call = flat_call(group, 0, torch.arange(5))
    with emulated_cuda():
        first, second = bag_lookup(group, call), bag_lookup(group, call)
        first.sum().backward()
        rows = group.read(0, torch.arange(5))
        clock = group.rows.row_clock.clone()
        second.sum().backward()
        with pytest.raises(
            RuntimeError, match=r"embedding_backward_: the rows were updated between"
        ):
            group.end_step()
        assert torch.equal(group.read(0, torch.arange(5)), rows)
        assert torch.equal(group.rows.row_clock, clock)


def test_the_next_op_reports_too() -> None:
    group = make_group()
    with emulated_cuda():
        insert_with(group, [0, 2, 5])()
        with pytest.raises(RuntimeError, match=r"found by the GPU in an earlier call, .* find\)"):
            group.contains(0, torch.arange(3))


def test_handles_and_dims_that_do_not_fit() -> None:
    group = make_group(dim=4, max_rows=100)
    call = flat_call(group, 0, torch.arange(3))
    far = torch.tensor([(10**6 << 28) | 1, -1, -2])
    assert_refused_on_device(
        group,
        lambda: bag_lookup(group, call, handles=far),
        "embedding: a handle names row 1000000",
    )
    rows = (group.rows.weights, group.rows.generations, group.index.meta, group.rows.init_data)
    arguments = (torch.ones(3, 4), call.ids, far, call.offsets, None, call.tables, call.dims, 0)
    assert_refused_on_device(
        group,
        lambda: torch.ops.dynemb.reduce_grad(*rows, *arguments),
        "reduce_grad: a handle names row 1000000",
    )
    with emulated_cuda():
        mixed = td.TableGroup(
            [td.TableConfig("a", 4), td.TableConfig("b", 8)], optimizer=td.SGD(lr=1)
        )
    wrong = call_of(mixed, [(0, [[1]]), (1, [[2]])])._replace(dims=[8, 4])
    assert_refused_on_device(
        mixed,
        lambda: bag_lookup(mixed, wrong, handles=torch.tensor([-1, -1])),
        r"feature_dims\[\d\] is not the dim of the feature",
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("handles", (10**6 << 28) | 1, "apply_grad_: entry 0 names a row or table"),
        ("tables", 5, "apply_grad_: entry 0 names a row or table"),
        ("counts", 99, r"apply_grad_: counts\[0\] is more than"),
    ],
)
def test_entries_that_reduce_grad_did_not_return(name: str, value: int, message: str) -> None:
    group = make_group(dim=4, max_rows=100)
    call = flat_call(group, 0, torch.arange(3))

    def update() -> None:
        handles = group.insert(0, call.ids)
        reduced = torch.ops.dynemb.reduce_grad(
            group.rows.weights,
            group.rows.generations,
            group.index.meta,
            group.rows.init_data,
            torch.ones(3, 4),
            call.ids,
            handles,
            call.offsets,
            None,
            call.tables,
            call.dims,
            0,
        )
        fields = dict(zip(("handles", "ids", "tables", "gradients"), reduced, strict=False))
        target = reduced[4] if name == "counts" else fields[name][0]
        target[0] = value
        number = group.config.optimizer.kernel_number
        torch.ops.dynemb.apply_grad_(*group.rows.updated, *reduced, torch.tensor([0]), [0], number)

    with emulated_cuda():
        group.insert(0, call.ids)
    assert_refused_on_device(group, update, message)


# -- a kernel that faults --------------------------------------------------------------------------


CALLS_AFTER_A_FAULT: dict[str, Callable[[td.TableGroup], object]] = {
    "insert": lambda group: group.insert(0, torch.arange(300)),
    "train": lambda group: train(group, 0, torch.arange(300), torch.ones(300, 64)),
    "contains": lambda group: group.contains(0, torch.arange(300)),
    "step": lambda group: group.step(),
    "erase": lambda group: group.erase(0, torch.arange(3)),
    "compact": lambda group: group.compact(),
    "state": lambda group: group.state.tensors(),
    "a new group": lambda _: make_group(),
}


@pytest.mark.parametrize("launch", [1, 9])
def test_after_a_fault_every_call_raises_and_tables_end(launch: int) -> None:
    """CUDA fails for good. Memory of tables that end then is neither given back nor used."""
    start = created_bytes()
    group, other = make_group(), make_group()
    try:
        with emulated_cuda():
            train(group, 0, torch.arange(200), torch.ones(200, 64))
            group.step()
            fault(launch)
            for _ in range(2):
                with contextlib.suppress(RuntimeError):  # the fault comes within
                    train(group, 0, torch.arange(300), torch.ones(300, 64))
            for call in CALLS_AFTER_A_FAULT.values():
                with pytest.raises(RuntimeError, match="illegal memory access"):
                    call(group)
            held = created_bytes()
            del group
            gc.collect()
            assert created_bytes() == held
    finally:
        fault(0)  # as a new process
    with emulated_cuda():
        other.step()
        assert created_bytes() < held
        other.insert(0, torch.arange(10))
        assert other.size(0) == 10
        del other
        gc.collect()
    assert created_bytes() == start


# -- large numbers of tables -----------------------------------------------------------------------


def test_more_features_than_one_upload_holds() -> None:
    """Arguments reach the device in pieces of 480 words."""
    tables = 700
    cpu = td.TableGroup(
        [td.TableConfig(f"table{t}", 2) for t in range(tables)], optimizer=td.SGD(lr=1), seed=1
    )
    group = make_group(dim=2, tables=tables, optimizer=td.SGD(lr=1), max_rows=5000)
    call = call_of(cpu, [(t, [[t, 1, 2]]) for t in range(tables)])
    for step in range(2):
        expected = bag_lookup(cpu, call)
        expected.backward(torch.ones_like(expected))
        with emulated_cuda():
            output = bag_lookup(group, call)
            output.backward(torch.ones_like(output))
        assert torch.equal(expected, output), step
    assert int(group.index.slabs[0, Slab.NEXT_ROW]) == int(cpu.index.slabs[0, Slab.NEXT_ROW])
