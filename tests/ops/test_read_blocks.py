"""Blocks of files, read by io_uring and by threads."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from torch_dynemb import ops
from torch_dynemb.ops import IoPath

pytestmark = pytest.mark.cpu_only("the CPU reads files to host memory")

PAGE = 4096
PAGES = 301
EVERY_PATH = pytest.mark.parametrize(
    "io", [IoPath.AUTO, *ops.store_io_paths()], ids=lambda io: io.name.lower()
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file of random bytes: whole pages, and 100 bytes more."""
    path = tmp_path_factory.mktemp("blocks") / "file of blöcks"
    data = random.Random(1).randbytes(PAGES * PAGE + 100)
    path.write_bytes(data)
    return path, data


def at(data: bytes, offsets: Tensor, size: int) -> Tensor:
    """What a read should give."""
    parts = b"".join(data[offset : offset + size] for offset in offsets.tolist())
    return torch.frombuffer(bytearray(parts), dtype=torch.uint8).reshape(len(offsets), size)


@EVERY_PATH
@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 5000])
def test_blocks_come_in_the_order_of_their_offsets(
    written: tuple[Path, bytes], io: IoPath, count: int, pages: int
) -> None:
    path, data = written
    draw = random.Random(count)
    offsets = torch.tensor([draw.randrange(PAGES - pages + 1) * PAGE for _ in range(count)])
    blocks = ops.read_blocks(path, offsets, block_bytes=pages * PAGE, io=io)
    assert torch.equal(blocks, at(data, offsets, pages * PAGE))


@EVERY_PATH
def test_a_block_of_a_whole_file(written: tuple[Path, bytes], io: IoPath) -> None:
    path, data = written
    blocks = ops.read_blocks(str(path), torch.tensor([0]), block_bytes=PAGES * PAGE, io=io)
    assert bytes(blocks[0].numpy()) == data[: PAGES * PAGE]


@EVERY_PATH
def test_no_blocks(written: tuple[Path, bytes], io: IoPath) -> None:
    none = torch.empty(0, dtype=torch.int64)
    blocks = ops.read_blocks(written[0], none, block_bytes=2 * PAGE, io=io)
    assert (blocks.shape, blocks.dtype) == ((0, 2 * PAGE), torch.uint8)


@EVERY_PATH
@pytest.mark.parametrize(
    ("offset", "pages"),
    [(PAGES, 1), (PAGES - 1, 2), (PAGES + 5, 1), (PAGES - 3, 64)],
    ids=["100 bytes left", "a page left", "nothing left", "3 pages left"],
)
def test_what_lies_behind_the_end_of_a_file(
    written: tuple[Path, bytes], io: IoPath, offset: int, pages: int
) -> None:
    """The others are read, and waited for."""
    path, _ = written
    offsets = torch.tensor([0, PAGE, offset * PAGE, 0, offset * PAGE])
    size = pages * PAGE
    message = (
        rf"read_blocks: 2 of 5 blocks of {path} cannot be read; the first one is at offset "
        rf"{offset * PAGE}: the file ends before the block does"
    )
    with pytest.raises(RuntimeError, match=message):
        ops.read_blocks(path, offsets, block_bytes=size, io=io)
    with pytest.raises(RuntimeError, match=r"1 of 1 blocks of .* the file ends before"):
        ops.read_blocks(path, offsets[2:3], block_bytes=size, io=io)


def test_both_paths_give_the_same(written: tuple[Path, bytes]) -> None:
    if len(ops.store_io_paths()) == 1:
        pytest.skip("this build or this kernel has no io_uring")
    offsets = torch.randint(PAGES, (5000,)) * PAGE
    by_ring, by_threads = (
        ops.read_blocks(written[0], offsets, block_bytes=PAGE, io=io) for io in (1, 2)
    )
    assert torch.equal(by_ring, by_threads)


@EVERY_PATH
def test_a_file_system_without_direct_reads(io: IoPath) -> None:
    """The one for shared memory has had none for long; whatever it has, reads are right."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("/dev/shm cannot be written")
    path = Path(f"/dev/shm/dynemb-blocks-{os.getpid()}-{io}")
    try:
        path.write_bytes(bytes(PAGE) + b"x" * PAGE)
        blocks = ops.read_blocks(path, torch.tensor([PAGE, 0]), block_bytes=PAGE, io=io)
        assert blocks.sum(1).tolist() == [ord("x") * PAGE, 0]
    finally:
        path.unlink(missing_ok=True)


@EVERY_PATH
def test_nothing_stays_open(written: tuple[Path, bytes], io: IoPath) -> None:
    """Neither files nor threads, also after an error.

    The kernel's own threads (``iou-wrk-...``) do not count: they start when a read would block,
    and end by themselves some seconds after the ring is closed.
    """
    path, _ = written

    def threads() -> set[str]:
        names = {}
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it ended since the folder was listed
                names[task.name] = (task / "comm").read_text()
        return {task for task, name in names.items() if not name.startswith("iou-")}

    def held() -> tuple[set[str], set[str]]:
        return set(os.listdir("/proc/self/fd")), threads()

    offsets = torch.tensor([0, PAGE, 0])
    ops.read_blocks(path, offsets, block_bytes=PAGE, io=io)
    before = held()
    for _ in range(3):
        ops.read_blocks(path, offsets, block_bytes=PAGE, io=io)
        with pytest.raises(RuntimeError, match="the file ends"):
            ops.read_blocks(path, offsets + PAGES * PAGE, block_bytes=PAGE, io=io)
        with pytest.raises(RuntimeError, match="it is not a file"):
            ops.read_blocks("/dev/null", offsets, block_bytes=PAGE, io=io)
    assert held() == before


def named(path: Path | str) -> Callable[[], Tensor]:
    return lambda: ops.read_blocks(path, torch.tensor([0]), block_bytes=PAGE)


def raw(path: bytes) -> Callable[[], Tensor]:
    name = torch.tensor(list(path), dtype=torch.uint8)
    return lambda: torch.ops.dynemb.read_blocks(name, torch.tensor([0]), PAGE, 0)


def with_numbers(offset: int, block_bytes: int, io: int = 0) -> Callable[[], Tensor]:
    return lambda: torch.ops.dynemb.read_blocks(
        torch.tensor([47], dtype=torch.uint8), torch.tensor([0, offset]), block_bytes, io
    )


PAGE_WANTED = "expected a multiple of 4096"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (named("/nowhere/at all"), "cannot open /nowhere/at all: No such file or directory"),
        (named("/tmp"), r"cannot open /tmp: (it is not a file|Is a directory)"),
        (named("/dev/null"), "cannot open /dev/null: it is not a file"),
        (raw(b""), "path is empty, expected the bytes of a path"),
        (raw(b"/dir/a\0b"), "path has a zero at 6, which no path has"),
        (with_numbers(PAGE + 512, PAGE), rf"offsets\[1\] is 4608, {PAGE_WANTED}"),
        (with_numbers(-PAGE, PAGE), rf"offsets\[1\] is -4096, {PAGE_WANTED}"),
        (with_numbers(0, 512), f"block_bytes is 512, {PAGE_WANTED}"),
        (with_numbers(0, 0), f"block_bytes is 0, {PAGE_WANTED}"),
        (with_numbers(0, -PAGE), f"block_bytes is -4096, {PAGE_WANTED}"),
        (with_numbers(0, 2**62), "block_bytes is .* larger than an address space"),
        (with_numbers(0, PAGE, 3), r"io is 3, expected 0 \(auto\), 1 \(uring\) or 2 \(threads\)"),
        (with_numbers(0, PAGE, -1), "io is -1, expected 0"),
    ],
)
def test_wrong_arguments(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"dynemb::read_blocks: {message}"):
        call()


ON_ANOTHER_DEVICE = r"but read_blocks reads files to host memory: copy to the CPU first"


@pytest.mark.parametrize("key", ["CPU", "CUDA"])
@pytest.mark.parametrize("name", ["path", "offsets"])
def test_the_kernel_refuses_what_is_not_on_the_cpu(key: str, name: str) -> None:
    kernel = torch.ops.dynemb.read_blocks.default._op_dk
    path, offsets = torch.tensor([47], dtype=torch.uint8), torch.tensor([0])
    arguments = (path.to("meta"), offsets) if name == "path" else (path, offsets.to("meta"))
    with pytest.raises(RuntimeError, match=f"{name} is on another device, {ON_ANOTHER_DEVICE}"):
        kernel(getattr(torch._C.DispatchKey, key), *arguments, PAGE, 0)


@pytest.mark.traced
def test_a_traced_call_says_the_same() -> None:
    read = torch.ops.dynemb.read_blocks
    with FakeTensorMode():
        path, offsets = torch.zeros(3, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64)
        assert read(path, offsets, PAGE, 0).shape == (5, PAGE)
        with pytest.raises(RuntimeError, match=f"path is on cuda:0, {ON_ANOTHER_DEVICE}"):
            read(path.to("cuda:0"), offsets.to("cuda:0"), PAGE, 0)
        with pytest.raises(RuntimeError, match=f"block_bytes is 100, {PAGE_WANTED}"):
            read(path, offsets, 100, 0)
        with pytest.raises(RuntimeError, match="io is 3, expected 0"):
            read(path, offsets, PAGE, 3)


# A filter of system calls that lets io_uring_setup, number 425 on every architecture, fail as
# containers do.
FORBIDDEN = """
import ctypes, errno, struct
libc = ctypes.CDLL(None, use_errno=True)
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
program = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in [
        (0x20, 0, 0, 0),  # load the number of the call
        (0x15, 0, 1, 425),  # another one jumps over the next
        (0x06, 0, 0, ERRNO | errno.EPERM),
        (0x06, 0, 0, ALLOW),
    ]
)
kept = ctypes.create_string_buffer(program)
filter = struct.pack("HxxxxxxP", 4, ctypes.addressof(kept))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
if libc.prctl(22, 2, filter, 0, 0) != 0:  # PR_SET_SECCOMP
    print("no filter")
    raise SystemExit
import torch
from torch_dynemb import ops
assert ops.store_io_paths() == [ops.IoPath.THREADS]
offsets = torch.tensor([0, 4096])
blocks = ops.read_blocks(PATH, offsets, block_bytes=4096)
assert torch.equal(blocks, ops.read_blocks(PATH, offsets, block_bytes=4096, io=2))
try:
    ops.read_blocks(PATH, offsets, block_bytes=4096, io=ops.IoPath.URING)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.long
def test_a_kernel_that_forbids_io_uring(written: tuple[Path, bytes]) -> None:
    program = FORBIDDEN.replace("PATH", repr(str(written[0])))
    reply = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    if "no filter" in reply:
        pytest.skip("this process may not filter system calls")
    assert "io is uring, but " in reply
    assert ": use threads, or auto" in reply
    if len(ops.store_io_paths()) == 2:
        assert "the kernel does not allow io_uring here" in reply
