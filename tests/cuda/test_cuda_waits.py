"""What the host waits for in steps on the emulated GPU, with every call that asks the device."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from emulated_groups import emulated_cuda
from emulator.mode import (
    calls_behind,
    created_bytes,
    launches,
    set_calls_behind,
    set_capturing,
    set_memory_limit,
    waits,
)
from group_calls import train

import torch_dynemb as td
from torch_dynemb.ops.columns import Table

pytestmark = pytest.mark.own_device


@pytest.fixture(autouse=True)
def no_setting_after_a_test() -> Iterator[None]:
    gc.collect()
    yield
    set_memory_limit(None)
    set_capturing(False)
    set_calls_behind(0)


def make_group() -> td.TableGroup:
    with emulated_cuda():
        return td.TableGroup([td.TableConfig("table", 16)], optimizer=td.Adam(lr=0.1), seed=1)


def train_step(group: td.TableGroup, ids: torch.Tensor) -> None:
    train(group, 0, ids, torch.ones(len(ids), 16))
    group.end_step()


def test_a_step_of_known_ids_waits_for_nothing() -> None:
    group = make_group()
    with emulated_cuda():
        train_step(group, torch.arange(5000))
        train_step(group, torch.arange(500))
        before = waits()
        for _ in range(40):
            train_step(group, torch.arange(500))
        assert waits() - before == Counter()


def test_a_host_that_is_ahead_asks_the_stream_once_for_each_call_that_it_waits_for() -> None:
    group = make_group()
    ids = torch.arange(50_000)
    with emulated_cuda():
        group.insert(0, ids)
        group.insert(0, ids)
        set_calls_behind(7)
        before = waits()
        for _ in range(8):
            group.insert(0, ids)
        asked = waits() - before
    assert calls_behind() == 1
    assert asked["cudaStreamQuery"] == 6
    assert set(asked) <= {"cudaStreamQuery", "cudaStreamSynchronize"}  # and clears new memory


def captured_group(ids: int) -> td.TableGroup:
    group = make_group()
    with emulated_cuda():
        group.insert(0, torch.arange(ids))
        set_capturing(True)
        group.insert(0, torch.arange(ids))
        set_capturing(False)
    return group


def test_a_captured_step_whose_table_grows_rehashes_rarely_and_does_not_wait() -> None:
    ids, steps = 50, 120
    group = captured_group(ids)
    with emulated_cuda():
        grown = int(group.index.tables[0, Table.GROWTHS])
        before = waits()
        for step in range(1, steps + 1):
            group.insert(0, torch.arange(step * ids, (step + 1) * ids))  # as a replay would
            group.end_step()
        waited = waits() - before
    assert group.size(0) == (steps + 1) * ids
    growths = int(group.index.tables[0, Table.GROWTHS]) - grown
    assert 1 <= growths <= 12  # 1.45 ** 10 = 41: from 200 ids to 6,050
    assert waited["cudaEventSynchronize"] == steps - 2  # the step before the last one
    # clearing of new memory, which becomes rare as well
    assert waited["cudaStreamSynchronize"] <= 12 * 6
    assert waited["cudaStreamQuery"] == waited["cudaDeviceSynchronize"] == 0


def test_a_captured_step_without_memory_for_a_usual_growth_grows_as_far_as_it_must() -> None:
    group = captured_group(60_000)
    with emulated_cuda():
        buckets = int(group.index.tables[0, Table.BUCKET_COUNT])
        group.insert(0, torch.arange(60_000, 66_000))
        for pages in range(20):
            set_memory_limit(created_bytes() + pages * (2 << 20))
            with contextlib.suppress(torch.OutOfMemoryError):
                group.end_step()
                break
    grown = int(group.index.tables[0, Table.BUCKET_COUNT])
    assert buckets < grown < buckets * 1.1


def test_rehashes_under_way_are_not_launched_again() -> None:
    group = captured_group(1000)
    with emulated_cuda():
        group.insert(0, torch.arange(1000, 2000))
        before = launches()
        group.end_step()
        with_rehash = launches() - before
        group.end_step()
        assert launches() - before - with_rehash < with_rehash
