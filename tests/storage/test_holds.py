"""Holds: what a store had at one time is read while it goes on, and takes its space until then."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from opened_store import HEADER, PAGE, SEGMENT, OpenedStore, handle, opened

from torch_dynemb import ops
from torch_dynemb.ops.columns import StoreStat

pytestmark = pytest.mark.cpu_only("is about files; tables with rows on a disk are on the CPU")

EVERY_PATH = pytest.mark.parametrize("io", ops.store_io_paths(), ids=lambda io: io.name)
A_SEGMENT = (SEGMENT // PAGE - 1) * 8  # records of 512 bytes
ROWS = 6 * A_SEGMENT
Content = dict[int, tuple[int, bytes]]


def read_held(store: OpenedStore, hold: int, handles: list[int]) -> ops.StoredRecords:
    ids = torch.tensor([(of >> 28) * 7 - 3 for of in handles], dtype=torch.int64)
    return ops.store_read_held(store.clock, hold, 0, torch.tensor(handles, dtype=torch.int64), ids)


def check_held(store: OpenedStore, hold: int, content: Content) -> None:
    """A hold has all of this, bit for bit."""
    records, found = read_held(store, hold, list(content))
    assert found.all()
    stored = [bytes(record) for record in records.numpy()]
    for (_, data), record in zip(content.values(), stored, strict=True):
        assert record[HEADER : HEADER + len(data)] == data


def overwrite(store: OpenedStore, seeds: range) -> None:
    for seed in seeds:
        rows = random.Random(seed).sample(range(90, ROWS), 300)
        store.write(0, rows, seed=seed)


@EVERY_PATH
def test_what_is_held_is_read_whatever_comes_after(tmp_path: Path, io: ops.IoPath) -> None:
    with opened(tmp_path, disk=30 * SEGMENT, io=io) as store:
        store.write(0, range(ROWS))
        overwrite(store, range(3))
        store.erase(0, [handle(row) for row in range(0, 90, 9)])
        hold, before = ops.store_hold(store.clock), store.copy_of_content()[0]
        collected = store.stat(StoreStat.COLLECTED)
        store.erase(0, [handle(row) for row in range(1, 90, 9)])
        store.write(0, range(0, 90, 9), generation=2)
        overwrite(store, range(3, 40))
        store.write(0, range(ROWS, ROWS + 100))
        assert store.stat(StoreStat.COLLECTED) > collected
        check_held(store, hold, before)
        store.check_content()
        # those that came after, or had gone before
        others = [handle(0, 2), handle(0), handle(ROWS), handle(ROWS + 5000)]
        records, found = read_held(store, hold, others)
        assert not found.any()
        assert not records.any()


def test_a_released_hold_gives_its_space_back(tmp_path: Path) -> None:
    with opened(tmp_path, disk=12 * SEGMENT) as store:
        store.write(0, range(ROWS))
        holds = [ops.store_hold(store.clock) for _ in range(2)]
        assert store.stat(StoreStat.PINNED_SEGMENTS) == 6
        for hold in holds:
            with pytest.raises(
                RuntimeError,
                match=r"disk full: .* keep \d+ segments .* are an asynchronous save's: wait for it",
            ):
                overwrite(store, range(200))
            ops.store_release(store.clock, hold)
        assert store.stat(StoreStat.PINNED_SEGMENTS) == 0
        overwrite(store, range(40))
        store.check_content()
        for call in (
            lambda: ops.store_release(store.clock, holds[0]),
            lambda: read_held(store, holds[0], [handle(1)]),
        ):
            with pytest.raises(RuntimeError, match=rf"hold is {holds[0]}, which path {tmp_path} d"):
                call()
        store.check_content()


def test_snapshots_and_holds_end_for_themselves(tmp_path: Path) -> None:
    nothing = [torch.zeros(0, dtype=torch.int64)]
    with opened(tmp_path, disk=40 * SEGMENT) as store:
        store.write(0, range(ROWS))
        snapshot, saved = ops.store_sync(store.clock), store.copy_of_content()
        overwrite(store, range(3))
        hold, held = ops.store_hold(store.clock), store.copy_of_content()[0]
        # a snapshot that is no more leaves what is held
        ops.store_keep(store.clock, nothing)
        overwrite(store, range(3, 30))
        check_held(store, hold, held)
        ops.store_release(store.clock, hold)
    with opened(tmp_path / "other", disk=40 * SEGMENT) as store:
        store.write(0, range(ROWS))
        snapshot, saved = ops.store_sync(store.clock), store.copy_of_content()
        ops.store_keep(store.clock, [snapshot.segments[0][1::2]])
        # a hold that is no more leaves what a snapshot has
        ops.store_release(store.clock, ops.store_hold(store.clock))
        overwrite(store, range(30))
        ops.store_load(store.clock, snapshot)
        store.written = saved
        store.check_content()


def test_nothing_is_gone_back_to_while_rows_are_held(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(100))
        snapshot, saved = ops.store_sync(store.clock), store.copy_of_content()
        store.write(0, range(50, 300), seed=1)
        hold, held = ops.store_hold(store.clock), store.copy_of_content()[0]
        with pytest.raises(RuntimeError, match=r"rows of path .* are pinned by an asynchronous"):
            ops.store_load(store.clock, snapshot)
        store.check_content()
        check_held(store, hold, held)
        ops.store_release(store.clock, hold)
        ops.store_load(store.clock, snapshot)
        store.written = saved
        store.check_content()


def test_a_record_that_was_damaged_is_told_and_the_store_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(2 * A_SEGMENT))
        hold = ops.store_hold(store.clock)
        for file in store.files()[:2]:
            data = bytearray(file.read_bytes())
            data[PAGE + 300] ^= 1
            file.write_bytes(data)
        with pytest.raises(RuntimeError, match=r"the record at offset 4096 of .* is damaged"):
            check_held(store, hold, store.copy_of_content()[0])
        ops.store_check(store.clock)
        ops.store_release(store.clock, hold)
        store.write(0, range(2 * A_SEGMENT), seed=1)
        store.check_content()


def test_a_store_that_has_failed_has_nothing_to_release(tmp_path: Path) -> None:
    with opened(tmp_path, disk=16 * SEGMENT) as store:
        hold = ops.store_hold(store.clock)
        store.write(0, range(10 * A_SEGMENT))
        ops.store_keep(store.clock, [torch.zeros(0, dtype=torch.int64)])
        for file in store.files():
            data = bytearray(file.read_bytes())
            for offset in range(PAGE + 300, len(data), 512):
                data[offset] ^= 1
            file.write_bytes(data)
        with pytest.raises(RuntimeError, match="is damaged"):
            overwrite(store, range(200))
        with pytest.raises(RuntimeError, match="is damaged"):
            ops.store_hold(store.clock)
        ops.store_release(store.clock, hold)


def test_a_forked_child_has_nothing_to_release(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(100))
        hold = ops.store_hold(store.clock)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                ops.store_release(store.clock, hold)
                with pytest.raises(RuntimeError, match="a forked process cannot use the store of"):
                    ops.store_hold(store.clock)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        check_held(store, hold, store.copy_of_content()[0])
