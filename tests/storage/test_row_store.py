"""Stores of rows: reads return what was written, files stay bounded, errors name damaged files."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opened_store import HEADER, MAX_ROWS, PAGE, SEGMENT, OpenedStore, handle, open_store, opened

from torch_dynemb import ops
from torch_dynemb.ops.columns import StoreStat

pytestmark = pytest.mark.cpu_only("is about files; tables with rows on a disk are on the CPU")

EVERY_PATH = pytest.mark.parametrize("io", ops.store_io_paths(), ids=lambda io: io.name)
# float32 columns, beside 4 bytes of state: records of 32 and 512 bytes, a whole page, two pages
DIMS = (1, 121, 1017, 1500)
A_SEGMENT = (SEGMENT // PAGE - 1) * 8  # records of 512 bytes


def draw_rows(draw: random.Random, most: int, count: int) -> list[int]:
    return draw.sample(range(most), count)


# -- rows ------------------------------------------------------------------------------------------


@EVERY_PATH
def test_what_was_written_is_read(tmp_path: Path, io: ops.IoPath) -> None:
    draw = random.Random(1)
    with opened(tmp_path / "store", DIMS, io=io) as store:
        assert [store.record_bytes(slab) for slab in range(4)] == [32, 512, PAGE, 6032]
        for seed in range(12):
            for slab in range(4):
                store.write(slab, draw_rows(draw, 300, draw.choice([1, 7, 100])), seed=seed)
            if seed % 4 == 3:
                store.check_content()
        assert store.stat(StoreStat.IO) == io
        assert store.stat(StoreStat.LIVE_RECORDS) == sum(len(rows) for rows in store.written)


def test_records_say_whose_they_are(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, [5, 2], generation=3)
        records, found = store.read(0, [handle(2, 3), handle(5, 3)])
    assert found.tolist() == [True, True]
    for record, row in zip(records, (2, 5), strict=True):
        head = bytes(record.numpy())
        assert int.from_bytes(head[:4], "little") == ops.crc32c(record[4:])
        assert int.from_bytes(head[4:8], "little") == 5  # the table
        assert int.from_bytes(head[8:16], "little") == handle(row, 3)
        assert int.from_bytes(head[16:24], "little") == row * 7 - 3


def test_a_row_has_the_record_of_its_owner_only(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, [4])
        store.write(0, [4], generation=2)
        records, found = store.read(0, [handle(4), handle(4, 2), handle(9), handle(MAX_ROWS - 1)])
        assert found.tolist() == [False, True, False, False]
        assert not records[[0, 2, 3]].any()
        store.check_content()


def test_slabs_in_memory_have_no_files(tmp_path: Path) -> None:
    with opened(tmp_path, (1, 121), tiered=[0, 1]) as store:
        store.write(1, [1, 2])
        store.check_content()
        snapshot = ops.store_sync(store.clock)
        assert [part.numel() > 0 for part in snapshot.records] == [False, True]
        with pytest.raises(RuntimeError, match=r"store_read: slab is 0, expected one with a log"):
            store.read(0, [handle(1)])
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["slab1"]


# -- space -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_rows_that_are_written_again_and_again_stay_within_the_disk(
    tmp_path: Path, factor: float
) -> None:
    """Twenty times as many as there are, every row kept, files never larger than was said."""
    segments = 30
    rows = segments * A_SEGMENT
    disk = int(segments * factor) * SEGMENT
    draw = random.Random(2)
    with opened(tmp_path, disk=disk) as store:
        for begin in range(0, rows, 1000):
            store.write(0, range(begin, min(rows, begin + 1000)))
        for seed in range(20 * rows // 900):
            store.write(0, draw_rows(draw, rows, 900), seed=seed)
            assert sum(file.stat().st_size for file in store.files()) <= disk
            assert store.stat(StoreStat.DISK_BYTES) <= disk
        assert store.stat(StoreStat.COLLECTED) > rows
        assert store.stat(StoreStat.LIVE_RECORDS) == rows
        store.check_content()


def test_without_a_bound_files_take_about_twice_the_rows(tmp_path: Path) -> None:
    rows = 30 * A_SEGMENT
    draw = random.Random(3)
    with opened(tmp_path) as store:
        store.write(0, range(rows))
        for seed in range(100):
            store.write(0, draw_rows(draw, rows, 900), seed=seed)
        assert store.stat(StoreStat.DISK_BYTES) <= 2.2 * 30 * SEGMENT
        assert store.stat(StoreStat.COLLECTED) > 0
        store.check_content()


def test_slabs_share_the_disk(tmp_path: Path) -> None:
    """What one slab has no use for any more goes to the other."""
    disk = 40 * SEGMENT
    draw = random.Random(4)
    with opened(tmp_path, (121, 1017), disk=disk) as store:
        for seed in range(30):
            store.write(0, draw_rows(draw, 8 * A_SEGMENT, 500), seed=seed)
        assert store.stat(StoreStat.DISK_BYTES) == disk
        store.write(1, range(15 * 15))  # a record is a page
        store.check_content()
        assert len(store.files(1)) >= 15
        assert len(store.files(0)) + len(store.files(1)) <= 40


def first_error(writes: Iterator[None]) -> str:
    """What the first write that is refused says."""
    try:
        for _ in writes:
            pass
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no write was refused")


def fill(store: OpenedStore, step: int = 200) -> str:
    """Write more and more rows; return the error of the full disk."""
    return first_error(
        store.write(0, range(begin, begin + step)) for begin in range(0, MAX_ROWS, step)
    )


def first_refusal(store: OpenedStore, rows: int) -> str:
    """Write the same rows again and again; return the error of the full disk."""
    return first_error(store.write(0, range(rows), seed=seed) for seed in range(10))


def test_a_full_disk_is_told_before_anything_changes(tmp_path: Path) -> None:
    with opened(tmp_path, disk=20 * SEGMENT) as store:
        told = fill(store)
        assert re.search(
            rf"disk full: path {tmp_path} needs \d+ more bytes for 200 rows of slab0, but there "
            rf"are \d+ of disk={20 * SEGMENT}; snapshots keep 0 segments \(0 bytes\)\. Nothing has "
            r"been changed\. Give a larger disk=, erase ids, or keep fewer snapshots",
            told,
        )
        written = len(store.written[0])
        assert written >= 15 * A_SEGMENT
        store.check_content()
        # with fewer rows there is room again, for old ones and new ones
        store.erase(0, [handle(row) for row in range(0, written, 3)])
        for seed in range(5):
            store.write(0, range(1, 400, 3), seed=seed)
        store.write(0, range(written, written + 200))
        store.check_content()


def test_after_snapshots_have_gone_there_is_room(tmp_path: Path) -> None:
    rows = 8 * A_SEGMENT
    with opened(tmp_path, disk=20 * SEGMENT) as store:
        store.write(0, range(rows))
        snapshot = ops.store_sync(store.clock)
        kept = snapshot.segments[0][1::2]
        ops.store_keep(store.clock, [kept])
        assert f"snapshots keep {len(kept)} segments" in first_refusal(store, rows)
        store.check_content()
        ops.store_keep(store.clock, [torch.zeros(0, dtype=torch.int64)])
        for seed in range(10):
            store.write(0, range(rows), seed=seed)
        store.check_content()


def test_a_snapshot_is_not_touched_by_what_comes_after_it(tmp_path: Path) -> None:
    rows = 6 * A_SEGMENT
    draw = random.Random(5)
    with opened(tmp_path, disk=30 * SEGMENT) as store:
        store.write(0, range(rows))
        snapshot = ops.store_sync(store.clock)
        ops.store_keep(store.clock, [snapshot.segments[0][1::2]])
        before = store.copy_of_content()
        for seed in range(40):
            store.write(0, draw_rows(draw, rows, 300), seed=seed)
        ops.store_load(store.clock, snapshot)
        store.written = before
        store.check_content()
        # and training goes on
        for seed in range(20):
            store.write(0, draw_rows(draw, rows, 300), seed=seed)
        store.check_content()


# -- snapshots -------------------------------------------------------------------------------------


@EVERY_PATH
def test_a_snapshot_survives_the_process(tmp_path: Path, io: ops.IoPath) -> None:
    """Written after the snapshot, and gone with the store: rows of several slabs and sizes."""
    draw = random.Random(6)
    with opened(tmp_path, DIMS, io=io) as store:
        for slab in range(4):
            store.write(slab, range(100 + 50 * slab))
        snapshot = ops.store_sync(store.clock)
        before = store.copy_of_content()
        for slab in range(4):
            store.write(slab, draw_rows(draw, 400, 60), seed=1)
    with opened(tmp_path, DIMS, io=io) as store:
        ops.store_load(store.clock, snapshot)
        store.written = before
        store.check_content()
        assert store.stat(StoreStat.LIVE_RECORDS) == sum(len(rows) for rows in before)
        for slab in range(4):
            store.write(slab, draw_rows(draw, 400, 60), seed=2)
        store.check_content()


def test_snapshots_of_two_moments(tmp_path: Path) -> None:
    """Any of those that are kept can be gone back to, in any order."""
    with opened(tmp_path) as store:
        moments = []
        for seed in range(3):
            store.write(0, range(seed * 150, 300 + seed * 150), seed=seed)
            moments.append((ops.store_sync(store.clock), store.copy_of_content()))
        kept = torch.cat([snapshot.segments[0][1::2] for snapshot, _ in moments]).unique()
        ops.store_keep(store.clock, [kept])
        for snapshot, content in [moments[1], moments[2], moments[0], moments[2]]:
            ops.store_load(store.clock, snapshot)
            store.written = [dict(rows) for rows in content]
            store.check_content()
            store.write(0, range(200), seed=9)


def test_files_are_deleted_when_it_is_known_which_are_needed(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(3 * A_SEGMENT))
        old = {file.name: file.read_bytes() for file in store.files()}
    with opened(tmp_path) as store:
        store.write(0, range(2 * A_SEGMENT), seed=1)
        assert {name: (tmp_path / "rows/slab0" / name).read_bytes() for name in old} == old
        added = {file.name for file in store.files()} - old.keys()
        assert min(added) > max(old)
        needed = min(old)
        ops.store_keep(store.clock, [torch.tensor([int(needed, 16)])])
        assert {file.name for file in store.files()} == {needed, *added}
        assert (tmp_path / "rows/slab0" / needed).read_bytes() == old[needed]
        store.check_content()


def test_nothing_new_takes_no_new_bytes(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(10))
        first = ops.store_sync(store.clock)
        written = store.stat(StoreStat.BYTES_WRITTEN)
        second = ops.store_sync(store.clock)
        assert store.stat(StoreStat.BYTES_WRITTEN) == written
        assert torch.equal(first.records[0], second.records[0])
        assert first.segments[0].tolist() == second.segments[0].tolist()


# -- damage ----------------------------------------------------------------------------------------


def place_of(store: OpenedStore, row: int) -> tuple[Path, int]:
    """The file and the offset of a row's record of 512 bytes, after a sync."""
    snapshot = ops.store_sync(store.clock)
    files = dict(snapshot.segments[0].reshape(-1, 2).tolist())
    number = int(snapshot.records[0][row]) >> 28
    place, k = divmod(number, A_SEGMENT)
    return store.path / "rows/slab0" / f"{files[place]:08x}", (1 + k // 8) * PAGE + k % 8 * 512


def change(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as opened_file:
        opened_file.seek(offset)
        opened_file.write(data)
        opened_file.flush()
        os.fsync(opened_file.fileno())


@pytest.mark.parametrize("byte", [0, 4, 9, 17, HEADER, 511])
@EVERY_PATH
def test_a_flipped_bit_is_told_by_name(tmp_path: Path, io: ops.IoPath, byte: int) -> None:
    with opened(tmp_path, io=io) as store:
        store.write(0, range(100))
        file, offset = place_of(store, 41)
        change(file, offset + byte, bytes([file.read_bytes()[offset + byte] ^ 4]))
        damaged = rf"the record at offset {offset} of {file} \(id {41 * 7 - 3}\) is damaged"
        with pytest.raises(RuntimeError, match=damaged):
            store.check_content()
        del store.written[0][handle(41)]
        store.check_content()


def test_a_record_of_another_row_is_not_used(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(100))
        file, offset = place_of(store, 41)
        _, other = place_of(store, 57)
        change(file, offset, file.read_bytes()[other : other + 512])
        expected = rf"offset {offset} of {file} \(id 284\) is of id 396, handle {handle(57)}, exp"
        with pytest.raises(RuntimeError, match=expected):
            store.read(0, [handle(41)])


def test_a_record_of_another_id_is_not_used(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, [3])
        with pytest.raises(
            RuntimeError, match=r"\(id 19\) is of id 18, handle .*, expected handle"
        ):
            ops.store_read(store.clock, 0, torch.tensor([handle(3)]), torch.tensor([19]))


@EVERY_PATH
def test_a_file_that_was_cut_is_told_by_name(tmp_path: Path, io: ops.IoPath) -> None:
    with opened(tmp_path, io=io) as store:
        store.write(0, range(2 * A_SEGMENT))
        file, _ = place_of(store, 1)
        os.truncate(file, 2 * PAGE)
        with pytest.raises(RuntimeError, match=rf"of {file} .* is behind the end of the file"):
            store.check_content()


def overwrite_until_it_fails(store: OpenedStore, rows: int) -> str:
    draw = random.Random(7)
    return first_error(store.write(0, draw_rows(draw, rows, 300), seed=seed) for seed in range(200))


def test_a_failure_of_the_thread_is_told_for_ever(tmp_path: Path) -> None:
    """Garbage collection does not copy damaged records: the damage could not be seen later."""
    rows = 10 * A_SEGMENT
    with opened(tmp_path, disk=16 * SEGMENT) as store:
        store.write(0, range(rows))
        ops.store_sync(store.clock)
        for file in store.files():
            data = bytearray(file.read_bytes())
            for offset in range(PAGE + 300, len(data), 512):
                data[offset] ^= 1
            change(file, PAGE, bytes(data[PAGE:]))
        ops.store_keep(store.clock, [torch.zeros(0, dtype=torch.int64)])
        told = overwrite_until_it_fails(store, rows)
        assert re.search(
            r"the record at offset \d+ of .*rows/slab0/\w+ \(id -?\d+\) is damaged", told
        )
        calls: list[Callable[[], Any]] = [
            lambda: ops.store_check(store.clock),
            lambda: ops.store_drain(store.clock),
            lambda: ops.store_sync(store.clock),
            lambda: store.write(0, [1]),
            lambda: store.read(0, [handle(1)]),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match=re.escape(told)):
                call()


def test_a_snapshot_whose_files_are_gone_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(3 * A_SEGMENT))
        snapshot = ops.store_sync(store.clock)
    numbers = snapshot.segments[0][1::2].tolist()
    file = tmp_path / "rows/slab0" / f"{numbers[1]:08x}"
    shutil.move(file, tmp_path / "away")
    with opened(tmp_path) as store:
        store.write(0, range(50), seed=1)
        there = store.files()

        def refused(message: str) -> None:
            with pytest.raises(RuntimeError, match=message):
                ops.store_load(store.clock, snapshot)
            store.check_content()

        refused(rf"the snapshot needs {file}, which is missing: copy it back")
        shutil.copy(tmp_path / "away", file)
        os.truncate(file, SEGMENT - 1)
        refused(rf"the snapshot needs {file}, which has {SEGMENT - 1} bytes, expected {SEGMENT}")
        shutil.copy(tmp_path / "rows/slab0" / f"{numbers[0]:08x}", file)
        refused(rf"the snapshot needs {file}, but its first page is damaged or of another file")
        shutil.copy(tmp_path / "away", file)
        assert sorted({*there, file}) == store.files()
        ops.store_load(store.clock, snapshot)


def altered(snapshot: ops.StoreSnapshot, part: str, change: Callable[[Any], Any]) -> Any:
    values = [tensor.clone() for tensor in getattr(snapshot, part)]
    values[0] = change(values[0])
    return snapshot._replace(**{part: values})


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("segments", lambda t: t[:-1], r"segments of .* has \d+ numbers, expected pairs"),
        ("segments", lambda t: t[2:], r"leads row 0 to place 1, which is not among the segments"),
        ("segments", lambda t: torch.cat([t, t]), r"has place 1 twice"),
        ("segments", lambda t: -t, r"has place -1"),
        ("records", lambda t: t + (1 << 62), r"leads row 0 to place \d+, which is not among"),
        ("records", lambda t: t.new_zeros(MAX_ROWS + 1), r"has 1048577 rows, expected at most"),
    ],
)
def test_a_snapshot_that_does_not_fit_changes_nothing(
    tmp_path: Path, part: str, change: Callable[[Any], Any], message: str
) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(3 * A_SEGMENT))
        snapshot = ops.store_sync(store.clock)
        with pytest.raises(RuntimeError, match=message):
            ops.store_load(store.clock, altered(snapshot, part, change))
        store.check_content()


# -- directories -----------------------------------------------------------------------------------

HOLD = """
import sys
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
from opened_store import open_store
store = open_store(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_a_second_process_is_told_the_first_one(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", HOLD, str(tmp_path), here]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(RuntimeError, match=rf"is in use by process {process.pid}: a store"):
            open_store(tmp_path)
        process.kill()
    with opened(tmp_path) as store:
        store.write(0, [1])


def test_a_second_store_of_the_process_is_told(tmp_path: Path) -> None:
    told = rf"path {tmp_path} is in use by process {os.getpid()} \(this one\)"
    with opened(tmp_path) as store:
        with pytest.raises(RuntimeError, match=told):
            open_store(tmp_path)
        store.write(0, [1])
        store.check_content()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": (119,)}, r"has records of 512 bytes of slab slab0, expected 504"),
        ({"segment": 2 * SEGMENT}, rf"has segments of {SEGMENT} bytes, expected {2 * SEGMENT}"),
        ({"dims": (1, 121), "tiered": [0, 1]}, r"has rows of slab slab0, which the tables do not"),
    ],
)
def test_files_of_other_tables_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(10))
    with pytest.raises(RuntimeError, match=message):
        open_store(tmp_path, **options)
    with opened(tmp_path) as store:  # the lock has been let go
        store.write(0, [1])


def test_another_version_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(10))
    text = (tmp_path / "FORMAT").read_text()
    (tmp_path / "FORMAT").write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(RuntimeError, match=r"has version 2 of the format, expected 1\. Give the"):
        open_store(tmp_path)
    (tmp_path / "FORMAT").unlink()
    with pytest.raises(RuntimeError, match=r"FORMAT is missing or damaged, but segments exist"):
        open_store(tmp_path)


def test_a_directory_without_rows_takes_any_tables(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    with opened(tmp_path, (3, 5), segment=2 * SEGMENT) as store:
        store.write(1, [1])
        store.check_content()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment": 5000}, r"segment_bytes is 5000, expected a multiple of 4096"),
        ({"segment": PAGE}, r"segment_bytes is 4096, which has no room for a record of 512 bytes"),
        ({"disk": 3 * SEGMENT}, rf"disk_bytes is {3 * SEGMENT}, expected 0 \(no bound\) or at"),
        ({"disk": -1}, r"disk_bytes is -1, expected"),
        ({"io": 3}, r"io is 3, expected 0 \(either\), 1 \(io_uring\) or 2 \(threads\)"),
        ({"tiered": [0]}, r"tiered is 0 for every slab, expected one to store"),
        ({"tiered": [1, 1]}, r"tiered.size\(0\) is 2, expected 1"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        open_store(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["", "a/b", "..", 'a"b', "ä"])
def test_names_that_are_no_directories(tmp_path: Path, name: str) -> None:
    with opened(tmp_path / "other") as other:
        pass
    with pytest.raises(RuntimeError, match=r"store_open: names has '.*', expected letters"):
        ops.store_open(
            other.tiers,
            other.rows,
            path=tmp_path / "store",
            slab_names=[name],
            tiered=[1],
            segment_bytes=SEGMENT,
        )


# -- calls -----------------------------------------------------------------------------------------


def test_copies_of_tensors_have_no_store(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        copy = store.clock.clone()
        for call in (ops.store_drain, ops.store_sync, ops.store_stats, ops.store_close):
            with pytest.raises(RuntimeError, match=r"tier_clock at this address has no store: it"):
                call(copy)
        store.write(0, [1])
    with pytest.raises(RuntimeError, match=r"store_drain: tier_clock at this address has no store"):
        ops.store_drain(store.clock)


def test_wrong_rows(tmp_path: Path) -> None:
    ids = torch.tensor([1])
    with opened(tmp_path) as store:
        records = torch.zeros(1, 512, dtype=torch.uint8)
        rows = torch.tensor([handle(1)])
        for arguments, message in [
            ((1, rows, ids, 0, records), r"slab is 1, expected 0 to 0"),
            ((0, rows[:0], ids, 0, records), r"ids.size\(0\) is 1, expected 0"),
            (
                (0, torch.tensor([-1]), ids, 0, records),
                r"handles\[0\] is -1, expected one of a row",
            ),
            ((0, torch.tensor([handle(MAX_ROWS)]), ids, 0, records), r"expected one of a row from"),
            ((0, rows, ids, -1, records), r"table is -1, expected 0 to"),
            ((0, rows, ids, 0, records[:, 1:].contiguous()), r"records.size\(1\) is 511, exp"),
            ((0, rows, ids, 0, records.int()), r"records has dtype int32, expected uint8"),
        ]:
            with pytest.raises(RuntimeError, match=message):
                ops.store_write(store.clock, *arguments)  # type: ignore[arg-type]
        assert store.stat(StoreStat.WRITES) == 0
        with pytest.raises(RuntimeError, match=r"files has 0 tensors, expected one for each of 1"):
            ops.store_keep(store.clock, [])


def test_nothing_is_written_and_read(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, [])
        nothing = torch.zeros(0, dtype=torch.int64)
        records, found = ops.store_read(store.clock, 0, nothing, nothing)
        assert (records.shape, found.shape) == ((0, 512), (0,))


def in_child(act: Callable[[], None]) -> int:
    """What a forked child exits with: 0 if `act` returns."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_cannot_use_the_store(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.write(0, range(100))

        def act() -> None:
            for call in (ops.store_drain, ops.store_sync, ops.store_stats):
                with pytest.raises(RuntimeError, match="a forked process cannot use the store of"):
                    call(store.clock)
            with pytest.raises(RuntimeError, match="a forked process cannot"):
                store.write(0, [1])
            store.close()  # joins nothing, and writes nothing

        assert in_child(act) == 0
        store.write(0, range(50, 200), seed=1)
        store.check_content()


def test_a_forked_child_does_not_hold_the_directory(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the parent lets go
        os._exit(0)
    try:
        store.close()
        with opened(tmp_path) as again:
            again.write(0, [1])
    finally:
        os.close(write_end)
        os.waitpid(child, 0)
