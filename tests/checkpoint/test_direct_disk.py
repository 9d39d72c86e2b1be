"""Files that are written past the page cache: their bytes, and file systems that cannot do that."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_dynemb.errors import DiskFullError
from torch_dynemb.files import direct_disk
from torch_dynemb.files.checksummed_files import ChecksummedWriter
from torch_dynemb.files.direct_disk import DirectDisk
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.scattered_file import ScatteredFile
from torch_dynemb.files.tensor_file import TensorShape, as_bytes, raw

pytestmark = pytest.mark.cpu_only("about files, without tables")

WINDOW = 2 * 4096


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_disk, "WINDOW_BYTES", WINDOW)


def is_direct(file: int) -> bool:
    return fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT != 0


class ToldDisk(Disk):
    """A disk that notes its writes, and answers direct ones as a test wants.

    Attributes:
        refuses: direct writes fail, as where a file system asks for a larger alignment.
        shortens: direct writes end inside a page.
        full: no write fits.
        writes: offset, size, and whether it was direct.
    """

    def __init__(
        self, *, refuses: bool = False, shortens: bool = False, full: bool = False
    ) -> None:
        self.refuses, self.shortens, self.full = refuses, shortens, full
        self.writes: list[tuple[int, int, bool]] = []

    def write_at(self, file: int, data: memoryview, begin: int) -> int:
        direct = is_direct(file)
        self.writes.append((begin, len(data), direct))
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        if direct and self.refuses:
            raise OSError(errno.EINVAL, "Invalid argument")
        if direct and self.shortens:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
            return super().write_at(file, data[:1000], begin)
        return super().write_at(file, data, begin)


def write_side_by_side(
    path: Path, disk: Disk, parts: list[Tensor], piece: int, *, in_room: bool = False
) -> None:
    """Write parts that lie one after another, piece by piece in turns.

    With ``in_room``, every other piece lies where the disk writes it without a copy. As in a save,
    the pieces of all parts are made before the first one is written.
    """
    file = disk.create(path)
    begins = [sum(of.numel() for of in parts[:k]) for k in range(len(parts))]
    for at in range(0, max(of.numel() for of in parts), piece):
        pieces = [of[at : at + piece] for of in parts]
        for k, (begin, data) in enumerate(zip(begins, pieces, strict=True)):
            if in_room and data.numel() > 0 and at // piece % 2 == 0:
                room = disk.room_at(file, begin + at, data.numel())
                fits = data.numel() <= WINDOW - (begin + at) % 4096
                assert (room is not None) == fits
                pieces[k] = data if room is None else room.copy_(data)
        for begin, data in zip(begins, pieces, strict=True):
            assert disk.write_at(file, raw(data), begin + at) == data.numel()
    disk.end(file)
    disk.sync(file)
    disk.close(file)


def random_parts(sizes: list[int]) -> list[Tensor]:
    return [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]


@given(
    st.lists(st.integers(1, 5 * WINDOW), min_size=1, max_size=4),
    st.integers(1500, 3 * WINDOW),
    st.booleans(),
)
@settings(deadline=None, database=None, max_examples=24)
def test_a_file_has_the_bytes_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], piece: int, in_room: bool
) -> None:
    path = tmp_path_factory.mktemp("direct") / "file"
    parts = random_parts(sizes)
    write_side_by_side(path, DirectDisk(Disk()), parts, piece, in_room=in_room)
    whole = torch.cat(parts)
    assert path.read_bytes() == bytes(raw(whole))


@pytest.mark.parametrize("answer", ["takes", "refuses", "shortens"])
def test_file_systems_that_cannot_write_past_the_cache(tmp_path: Path, answer: str) -> None:
    disk = ToldDisk(refuses=answer == "refuses", shortens=answer == "shortens")
    parts = random_parts([5 * WINDOW + 100, 4 * WINDOW + 10])
    write_side_by_side(tmp_path / "file", DirectDisk(disk), parts, 3000, in_room=True)
    whole = torch.cat(parts)
    assert (tmp_path / "file").read_bytes() == bytes(raw(whole))
    direct = [write for write in disk.writes if write[2]]
    assert all(begin % 4096 == size % 4096 == 0 for begin, size, _ in direct)
    if answer == "takes":
        size = sum(size for _, size, _ in direct)
        assert size == 0 or size >= 9 * WINDOW - 2 * 4096  # 0: this file system has no such writes
    else:
        assert len(direct) <= 1  # then no more


def test_small_files_go_through_the_cache(tmp_path: Path) -> None:
    disk = ToldDisk()
    write_side_by_side(tmp_path / "file", DirectDisk(disk), random_parts([WINDOW - 1]), 5000)
    assert [direct for _, _, direct in disk.writes] == [False] * 2


def test_rows_are_written_from_their_room(tmp_path: Path) -> None:
    """A tensor has no room at a place that is not aligned."""
    shapes = [
        TensorShape("b", torch.float32, (1000, 3)),
        TensorShape("c", torch.uint8, (1,)),
        TensorShape("d", torch.float32, (1000,)),
    ]
    disk = ToldDisk()
    file = ScatteredFile(DirectDisk(disk), tmp_path / "file", shapes)
    room = file.room("b", 500)
    assert room is not None
    assert (room.shape, room.dtype) == ((500, 3), torch.float32)
    file.append("b", room.fill_(1.0))
    again = file.room("b", 500)
    assert again is not None
    file.append("b", again.fill_(2.0))
    file.append("c", torch.ones(1, dtype=torch.uint8))
    assert file.room("d", 1000) is None
    assert file.room("d", 0) is None
    file.append("d", torch.arange(1000.0))
    sums = file.finish()
    plain = ScatteredFile(Disk(), tmp_path / "plain", shapes)
    assert plain.room("b", 500) is None
    plain.append("b", torch.cat([torch.full((500, 3), 1.0), torch.full((500, 3), 2.0)]))
    plain.append("c", torch.ones(1, dtype=torch.uint8))
    plain.append("d", torch.arange(1000.0))
    assert plain.finish() == sums
    assert (tmp_path / "file").read_bytes() == (tmp_path / "plain").read_bytes()


def test_checksummed_files_are_those_of_another_disk(tmp_path: Path) -> None:
    values = {"a": torch.randn(3000, 3), "b": torch.arange(3000)}
    shapes = [TensorShape(name, of.dtype, tuple(of.shape)) for name, of in values.items()]
    sums = []
    for name, disk in (("plain", Disk()), ("direct", DirectDisk(Disk()))):
        scattered = ScatteredFile(disk, tmp_path / f"{name} scattered", shapes)
        for begin in range(0, 3000, 700):
            for of in values:
                scattered.append(of, values[of][begin : begin + 700])
        writer = ChecksummedWriter(disk, tmp_path / f"{name} in order")
        for piece in as_bytes(values["a"]).split(5000):
            writer.write(piece)
        sums.append((scattered.finish(), writer.finish()))
    assert sums[0] == sums[1]
    for kind in ("scattered", "in order"):
        of_direct = (tmp_path / f"direct {kind}").read_bytes()
        assert of_direct == (tmp_path / f"plain {kind}").read_bytes()


def test_a_full_disk_is_told_at_the_end_of_a_small_file(tmp_path: Path) -> None:
    writer = ChecksummedWriter(DirectDisk(ToldDisk(full=True)), tmp_path / "file")
    writer.write(torch.arange(10))
    with pytest.raises(DiskFullError, match="after 80 bytes"):
        writer.end()
    writer.close()
