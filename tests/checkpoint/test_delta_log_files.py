"""Files of a delta log: a torn tail is ignored, and any other damage is an error."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from logged_batches import batches, read
from started import start_server

from torch_dynemb import errors
from torch_dynemb.changes import batch as batch_format
from torch_dynemb.checkpoint import DamagedFileError
from torch_dynemb.delta_log import DirectorySink
from torch_dynemb.delta_log.log_folder import rank_folders
from torch_dynemb.delta_log.reader import batch_of
from torch_dynemb.files.disk import Disk

pytestmark = pytest.mark.cpu_only("about files, without tables")


def written(path: Path, segments: list[list[bytes]]) -> DirectorySink:
    """Write a log with these batches in its files."""
    path.mkdir()
    sequence = 1
    for segment in segments:
        (path / f"{sequence:020}.delta").write_bytes(b"".join(segment))
        sequence += len(segment)
    return DirectorySink(path)


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    sink, data = DirectorySink(tmp_path / "a" / "log", segment_bytes=500), batches(9)
    for sequence, of in enumerate(data, start=1):
        sink.append(memoryview(of), sequence)
        assert read(sink, sequence) == [sequence]  # from where it was read last
    assert len(list((tmp_path / "a" / "log").glob("*.delta"))) > 2
    assert [bytes(of) for of in sink.read(0)] == data
    assert read(DirectorySink(sink.path), 5) == [5, 6, 7, 8, 9]
    sink.close()


def test_a_torn_tail_is_no_batch_wherever_it_is_torn(tmp_path: Path) -> None:
    one, two, three = batches(3)
    for end in range(len(two) + 1):
        sink = written(tmp_path / str(end), [[one, two[:end]]])
        assert read(sink) == ([1, 2] if end == len(two) else [1])
    for begin in (0, len(one)):  # what was never written of a file that is long enough is zeros
        torn = bytearray(one + two)
        torn[begin:] = bytes(len(torn) - begin)
        sink = written(tmp_path / f"zeros{begin}", [[bytes(torn)]])
        assert read(sink) == ([1] if begin else [])
        sink.append(memoryview(two if begin else one), 2 if begin else 1)
        assert read(sink) == ([1, 2] if begin else [1])
        sink.close()
    sink = written(tmp_path / "goes on", [[one, two[:-1]]])
    sink.append(memoryview(two), 2)
    sink.append(memoryview(three), 3)
    assert [bytes(of) for of in sink.read(0)] == [one, two, three]
    sink.close()


@pytest.mark.parametrize("flipped", [1, 0x80, 0xFF])
def test_a_flipped_byte_is_an_error_wherever_it_is(tmp_path: Path, flipped: int) -> None:
    data = b"".join(batches(3))
    sink = written(tmp_path / "log", [[data]])
    path = next(sink.path.glob("*.delta"))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= flipped
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=r"delta: byte \d+: .*rollback"):
            list(sink.read(0))


def test_a_batch_that_ends_before_another_segment_is_an_error(tmp_path: Path) -> None:
    one, two, three = batches(3)
    sink = written(tmp_path / "log", [[one, two[:-5]], [three]])
    with pytest.raises(DamagedFileError, match="another segment follows"):
        list(sink.read(0))


def test_a_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (one,) = batches(1)
    text = bytearray(one[: batch_format.HEAD_BYTES])
    text[8] = 2
    text[-4:] = batch_format._crc(bytes(text[:-4])).to_bytes(4, "little")
    sink = written(tmp_path / "log", [[bytes(text) + one[batch_format.HEAD_BYTES :]]])
    with pytest.raises(errors.UnsupportedFormatError, match="its format version is 2, but this"):
        list(sink.read(0))


NO_BATCH = {
    **{f"{size} bytes": {"bytes": size} for size in (0, 1, 47, 127, 129)},
    "endless": {"bytes": 1 << 63},
    "rank 1 of 1": {"rank": 1},
    "a base of its own": {"base_sequence": 2},
    "a base behind it": {"base_sequence": (1 << 64) - 1},
    "a sequence of 64 bits": {"sequence": 1 << 63},
}


@pytest.mark.parametrize("numbers", NO_BATCH.values(), ids=NO_BATCH)
def test_heads_with_numbers_that_no_batch_has_are_errors(
    tmp_path: Path, numbers: dict[str, int]
) -> None:
    one, two = batches(2)
    head = batch_format.head_of(two)
    assert head is not None
    text = batch_format._head_bytes(head._replace(**numbers))
    crafted = text + two[batch_format.HEAD_BYTES :]
    sink = written(tmp_path / "log", [[one, crafted]])
    with pytest.raises(DamagedFileError, match=r"byte \d+: its head has (an )?impossible"):
        list(sink.read(0))
    with pytest.raises(DamagedFileError, match=r"its head has (an )?impossible"):
        batch_of(crafted)


def test_folders_of_more_ranks_than_there_can_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r000-of-4000000000").mkdir()
    with pytest.raises(ValueError, match="a log of 4000000000 ranks, expected at most 65536"):
        rank_folders(tmp_path)


def test_batches_are_dropped_at_both_ends(tmp_path: Path) -> None:
    data = batches(8)
    sink = written(tmp_path / "log", [data[:3], data[3:6], data[6:]])
    sink.truncate(6)
    assert read(sink) == [4, 5, 6, 7, 8]  # whole files
    sink.truncate(100)
    assert read(sink) == [7, 8]  # the last one stays
    sink.drop_after(7)
    assert read(sink) == [7]
    sink.append(memoryview(data[7]), 8)
    assert read(sink) == [7, 8]
    sink.drop_after(0)
    assert read(sink) == []
    sink.close()


def test_a_damaged_batch_can_be_rolled_back(tmp_path: Path) -> None:
    data = batches(3)
    damaged = bytearray(b"".join(data))
    damaged[len(data[0]) + len(data[1]) + 3] ^= 1
    sink = written(tmp_path / "log", [[bytes(damaged)]])
    with pytest.raises(DamagedFileError):
        sink.append(memoryview(batches(4)[3]), 4)
    sink.drop_after(2)
    sink.append(memoryview(data[2]), 3)
    assert read(sink) == [1, 2, 3]
    sink.close()


def _hold(path: str, ready: Any, *, forks: bool = False) -> None:
    sink = DirectorySink(path)
    sink.lock()
    if forks and (child := os.fork()) != 0:
        Path(f"{path}.child").write_text(str(child))
        ready.set()
    elif not forks:
        ready.set()
    threading.Event().wait()


def test_a_forked_child_has_no_part_in_the_lock(tmp_path: Path) -> None:
    context = start_server()
    ready = context.Event()
    path = tmp_path / "log"
    process = context.Process(target=_hold, args=(str(path), ready), kwargs={"forks": True})
    process.start()
    assert ready.wait(60)
    child = int(Path(f"{path}.child").read_text())
    try:
        with pytest.raises(RuntimeError, match=f"has a writer, process {process.pid}"):
            DirectorySink(path).lock()
        process.kill()
        process.join()
        os.kill(child, 0)  # a worker that waits for work
        sink = DirectorySink(path)
        sink.lock()
        sink.close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_one_process_writes_and_a_dead_one_does_not(tmp_path: Path) -> None:
    context = start_server()
    ready = context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path / "log"), ready), daemon=True)
    process.start()
    assert ready.wait(60)
    sink = DirectorySink(tmp_path / "log")
    with pytest.raises(RuntimeError, match=f"has a writer, process {process.pid}"):
        sink.lock()
    process.kill()
    process.join()
    sink.lock()
    with pytest.raises(RuntimeError, match=f"has a writer, process {os.getpid()}"):
        DirectorySink(tmp_path / "log").lock()
    sink.close()
    other = DirectorySink(tmp_path / "log")
    other.lock()
    other.close()


def test_a_disk_that_fails_keeps_no_batch(tmp_path: Path) -> None:
    class Failing(Disk):
        calls = 0
        fails_at = -1

        def write_at(self, file: int, data: memoryview, begin: int) -> int:
            self._count()
            return int(super().write_at(file, data[: max(1, len(data) // 2)], begin))

        def sync(self, file: int) -> None:
            self._count()
            super().sync(file)

        def _count(self) -> None:
            self.calls += 1
            if self.calls == self.fails_at:
                raise OSError(28, "No space left on device")

    one, two = batches(2, size=40)
    calls = 1
    while True:
        sink = DirectorySink(tmp_path / str(calls))
        sink.append(memoryview(one), 1)
        disk = sink._disk = Failing()
        disk.fails_at = calls
        try:
            sink.append(memoryview(two), 2)
        except OSError:
            assert read(sink) == [1]
            sink.append(memoryview(two), 2)
        assert [bytes(of) for of in sink.read(0)] == [one, two]
        sink.close()
        if disk.calls < calls:
            break
        calls += 1
    assert calls > 6
