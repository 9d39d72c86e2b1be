"""Pins: rows of a store at one time are read while it goes on; their files stay until release."""

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


def read_pinned(store: OpenedStore, pin: int, handles: list[int]) -> ops.StoredRecords:
    ids = torch.tensor([(of >> 28) * 7 - 3 for of in handles], dtype=torch.int64)
    numbers = torch.tensor(handles, dtype=torch.int64)
    return ops.store_read(store.clock, 0, numbers, ids, pin=pin)


def check_pinned(store: OpenedStore, pin: int, content: Content) -> None:
    """Check that a pin has all of this, bit for bit."""
    records, found = read_pinned(store, pin, list(content))
    assert found.all()
    stored = [bytes(record) for record in records.numpy()]
    for (_, data), record in zip(content.values(), stored, strict=True):
        assert record[HEADER : HEADER + len(data)] == data


def overwrite(store: OpenedStore, seeds: range) -> None:
    for seed in seeds:
        rows = random.Random(seed).sample(range(90, ROWS), 300)
        store.write(0, rows, seed=seed)


@EVERY_PATH
def test_pinned_rows_are_read_after_later_changes(tmp_path: Path, io: ops.IoPath) -> None:
    with opened(tmp_path, disk=30 * SEGMENT, io=io) as store:
        store.write(0, range(ROWS))
        overwrite(store, range(3))
        store.erase(0, [handle(row) for row in range(0, 90, 9)])
        pin, before = ops.store_pin(store.clock), store.copy_of_content()[0]
        collected = store.stat(StoreStat.COLLECTED)
        store.erase(0, [handle(row) for row in range(1, 90, 9)])
        store.write(0, range(0, 90, 9), generation=2)
        overwrite(store, range(3, 40))
        store.write(0, range(ROWS, ROWS + 100))
        assert store.stat(StoreStat.COLLECTED) > collected
        check_pinned(store, pin, before)
        store.check_content()
        # those that came after, or had gone before
        others = [handle(0, 2), handle(0), handle(ROWS), handle(ROWS + 5000)]
        records, found = read_pinned(store, pin, others)
        assert not found.any()
        assert not records.any()


def test_a_released_pin_gives_its_space_back(tmp_path: Path) -> None:
    with opened(tmp_path, disk=12 * SEGMENT) as store:
        store.write(0, range(ROWS))
        pins = [ops.store_pin(store.clock) for _ in range(2)]
        assert store.stat(StoreStat.PINNED_SEGMENTS) == 6
        for pin in pins:
            with pytest.raises(
                RuntimeError,
                match=r"disk full: .* keep \d+ segments .* are an asynchronous save's: wait for it",
            ):
                overwrite(store, range(200))
            ops.store_release(store.clock, pin)
        assert store.stat(StoreStat.PINNED_SEGMENTS) == 0
        overwrite(store, range(40))
        store.check_content()
        for call in (
            lambda: ops.store_release(store.clock, pins[0]),
            lambda: read_pinned(store, pins[0], [handle(1)]),
        ):
            with pytest.raises(RuntimeError, match=rf"pin is {pins[0]}, which path {tmp_path} d"):
                call()
        store.check_content()


def test_snapshots_and_pins_end_independently(tmp_path: Path) -> None:
    nothing = [torch.zeros(0, dtype=torch.int64)]
    with opened(tmp_path, disk=40 * SEGMENT) as store:
        store.write(0, range(ROWS))
        snapshot, saved = ops.store_sync(store.clock), store.copy_of_content()
        overwrite(store, range(3))
        pin, pinned = ops.store_pin(store.clock), store.copy_of_content()[0]
        # the end of a snapshot leaves pinned rows
        ops.store_keep(store.clock, nothing)
        overwrite(store, range(3, 30))
        check_pinned(store, pin, pinned)
        ops.store_release(store.clock, pin)
    with opened(tmp_path / "other", disk=40 * SEGMENT) as store:
        store.write(0, range(ROWS))
        snapshot, saved = ops.store_sync(store.clock), store.copy_of_content()
        ops.store_keep(store.clock, [snapshot.segments[0][1::2]])
        # the end of a pin leaves what a snapshot has
        ops.store_release(store.clock, ops.store_pin(store.clock))
        overwrite(store, range(30))
        ops.store_load(store.clock, snapshot)
        store.written = saved
        store.check_content()


def test_no_snapshot_is_loaded_while_rows_are_pinned(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(100))
        snapshot, saved = ops.store_sync(store.clock), store.copy_of_content()
        store.write(0, range(50, 300), seed=1)
        pin, pinned = ops.store_pin(store.clock), store.copy_of_content()[0]
        with pytest.raises(RuntimeError, match=r"rows of path .* are pinned by an asynchronous"):
            ops.store_load(store.clock, snapshot)
        store.check_content()
        check_pinned(store, pin, pinned)
        ops.store_release(store.clock, pin)
        ops.store_load(store.clock, snapshot)
        store.written = saved
        store.check_content()


def test_a_damaged_record_is_reported_and_the_store_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(2 * A_SEGMENT))
        pin = ops.store_pin(store.clock)
        for file in store.files()[:2]:
            data = bytearray(file.read_bytes())
            data[PAGE + 300] ^= 1
            file.write_bytes(data)
        with pytest.raises(RuntimeError, match=r"the record at offset 4096 of .* is damaged"):
            check_pinned(store, pin, store.copy_of_content()[0])
        ops.store_check(store.clock)
        ops.store_release(store.clock, pin)
        store.write(0, range(2 * A_SEGMENT), seed=1)
        store.check_content()


def test_a_store_that_has_failed_has_nothing_to_release(tmp_path: Path) -> None:
    with opened(tmp_path, disk=16 * SEGMENT) as store:
        pin = ops.store_pin(store.clock)
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
            ops.store_pin(store.clock)
        ops.store_release(store.clock, pin)


def test_a_forked_child_has_nothing_to_release(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(100))
        pin = ops.store_pin(store.clock)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                ops.store_release(store.clock, pin)
                with pytest.raises(RuntimeError, match="a forked process cannot use the store of"):
                    ops.store_pin(store.clock)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        check_pinned(store, pin, store.copy_of_content()[0])
