"""Memory of groups on the emulated GPU that is given back: after refusals, and where it is idle."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from emulated_groups import emulated_cuda
from emulator.mode import (
    created_bytes,
    forbidden_calls,
    refuse_unmapping,
    set_calls_behind,
    set_capturing,
    set_capturing_elsewhere,
    set_memory_limit,
)
from group_calls import train

import torch_dynemb as td
from torch_dynemb.table.changes import read_changes, record_changes, take_changes

pytestmark = pytest.mark.own_device

MIB = 1 << 20
ROW = 64 * 4 * 3 + 4 + 8  # bytes of weights, Adam's state, generation and entry of the free list
STEPS = 200  # more than three periods: memory of the first one is given back


@pytest.fixture(autouse=True)
def no_setting_after_a_test() -> Iterator[None]:
    gc.collect()
    yield
    set_memory_limit(None)
    set_capturing(False)
    set_capturing_elsewhere(False)
    set_calls_behind(0)
    refuse_unmapping(0)


def make_group(tables: int = 1) -> td.TableGroup:
    configs = [td.TableConfig(f"table{t}", 64) for t in range(tables)]
    with emulated_cuda():
        return td.TableGroup(configs, optimizer=td.Adam(lr=0.1), seed=1)


# -- after a refusal -----------------------------------------------------------------------------


def test_a_refused_insertion_leaves_as_much_memory_free_as_there_was() -> None:
    group = make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(20_000))
        before = created_bytes()
        set_memory_limit(before + 30 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match="no id was inserted"):
            group.insert(0, torch.arange(20_000, 80_000))
        assert created_bytes() == before
        set_memory_limit(None)
        train(group, 0, torch.arange(19_000, 21_000), torch.ones(2000, 64))
    assert group.size(0) == 21_000


def test_a_larger_mapping_that_fails_takes_nothing_from_the_one_that_is_needed() -> None:
    """Rows grow by an eighth more where there is memory for it, but need less than is left."""
    group = make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(100_000))
        held = created_bytes()
        needed = 16_000 * (ROW + 64)
        set_memory_limit(held + needed + 20 * MIB)
        group.insert(0, torch.arange(100_000, 116_000))
    assert group.size(0) == 116_000


def test_a_refused_capture_leaves_as_much_memory_free_as_there_was() -> None:
    group = make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(1000))
        for attempt in range(2):
            before = created_bytes()
            set_memory_limit(before + 24 * MIB)
            set_capturing(True)
            with pytest.raises(torch.OutOfMemoryError, match="replays of a captured step"):
                group.insert(0, torch.arange(1000, 30_000))
            set_capturing(False)
            # a table of an earlier test may end in the first one
            assert created_bytes() == before or (attempt == 0 and created_bytes() < before)


# -- what steps do not need ----------------------------------------------------------------------


def known_ids_once(group: td.TableGroup) -> int:
    """Maps much more than 1,000 ids need; the bytes that are mapped."""
    group.insert(0, torch.arange(120_000) % 1000)
    return created_bytes()


def steps_of_known_ids(group: td.TableGroup) -> None:
    for _ in range(STEPS):
        group.insert(0, torch.arange(100))
        group.end_step()


@pytest.mark.long
def test_memory_is_given_back_while_the_host_is_ahead() -> None:
    group = make_group()
    with emulated_cuda():
        mapped = known_ids_once(group)
        for _ in range(STEPS):
            group.insert(0, torch.arange(100))
            set_calls_behind(3)
            group.end_step()
        assert mapped - created_bytes() >= 60_000 * ROW
        set_calls_behind(0)
        train(group, 0, torch.arange(20_000), torch.ones(20_000, 64))
        assert group.size(0) == 20_000


def test_rows_that_calls_under_way_may_take_are_not_given_back() -> None:
    group = make_group()
    with emulated_cuda():
        known_ids_once(group)
        for _ in range(STEPS // 2):
            group.end_step()
        group.insert(0, torch.arange(60_000) % 20_000)
        set_calls_behind(1)  # for all steps: the host does not learn that these ids have come
        for _ in range(STEPS):
            group.end_step()
        assert created_bytes() >= 61_000 * ROW  # all of these might have been new
        set_calls_behind(0)
        assert bool(group.contains(0, torch.arange(20_000)).all())


def test_memory_is_given_back_after_a_capture() -> None:
    group = make_group()
    with emulated_cuda():
        mapped = known_ids_once(group)
        set_capturing(True)
        group.insert(0, torch.arange(100))
        set_capturing(False)
        for step in range(STEPS):
            group.insert(0, torch.arange(step, 100 + step))
            group.end_step()
        assert mapped - created_bytes() >= 60_000 * ROW
        # the next replays have room for three times the ids of the capture
        group.insert(0, torch.arange(1000, 1300))
        group.end_step()
        assert group.size(0) == 1300


def test_memory_is_given_back_while_another_thread_captures() -> None:
    group = make_group()
    with emulated_cuda():
        mapped, forbidden = known_ids_once(group), forbidden_calls()
        set_capturing_elsewhere(True)
        steps_of_known_ids(group)
        assert forbidden_calls() == forbidden
        assert mapped - created_bytes() >= 60_000 * ROW


@pytest.mark.long
def test_a_driver_that_refuses_to_unmap_leaves_a_usable_table() -> None:
    group = make_group()
    with emulated_cuda():
        mapped = known_ids_once(group)
        refuse_unmapping(1)
        with pytest.raises(RuntimeError, match="GPU driver failed in giving memory back"):
            steps_of_known_ids(group)
        values = group.read(0, torch.arange(1000))
        train(group, 0, torch.arange(20_000), torch.ones(20_000, 64))  # maps what is missing
        assert group.size(0) == 20_000
        assert not torch.equal(group.read(0, torch.arange(1000)), values)
        steps_of_known_ids(group)
        assert created_bytes() <= mapped


@pytest.mark.long
def test_a_compaction_that_the_driver_refuses_leaves_a_usable_table() -> None:
    group = make_group()
    with emulated_cuda():
        train(group, 0, torch.arange(12_000), torch.ones(12_000, 64))
        group.erase(0, torch.arange(1000, 12_000))
        refuse_unmapping(1)
        with pytest.raises(RuntimeError, match="GPU driver failed in giving memory back"):
            group.compact()
        train(group, 0, torch.arange(13_000), torch.ones(13_000, 64))
        assert group.size(0) == 13_000


# -- tensors that join the rows ------------------------------------------------------------------


def test_marks_of_changed_rows_take_memory_as_rows_come() -> None:
    group = make_group(tables=2)
    with emulated_cuda():
        train(group, 0, torch.arange(2000), torch.ones(2000, 64))
        before = created_bytes()
        reader = record_changes(group.tables, "test", scores=False)
        rows = group.rows.weights[0].shape[0]
        assert rows > 16 * MIB  # a byte for each of them
        assert created_bytes() - before <= 2 * MIB
        take_changes(group.tables, reader, read_changes(group.tables, reader), None)
        train(group, 1, torch.arange(12_000), torch.ones(12_000, 64))
        train(group, 0, torch.arange(10, 20), torch.ones(10, 64))
        changes = read_changes(group.tables, reader)
        assert sorted(changes.tables[0].ids.tolist()) == list(range(10, 20))
        assert changes.tables[1].ids.numel() == 12_000


def test_marks_without_memory_are_refused_and_leave_the_group_as_it_was() -> None:
    group = make_group()
    with emulated_cuda():
        train(group, 0, torch.arange(100), torch.ones(100, 64))
        set_memory_limit(created_bytes())
        with pytest.raises(RuntimeError, match="out of GPU memory"):
            record_changes(group.tables, "test", scores=False)
        set_memory_limit(None)
        assert group.rows.dirty_bits == []
        record_changes(group.tables, "test", scores=False)
        train(group, 0, torch.arange(100), torch.ones(100, 64))
