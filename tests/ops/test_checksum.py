"""crc32c: published values, a reference bit by bit, and every instruction set."""

from __future__ import annotations

import random
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from execution import simd, simd_levels
from torch import Tensor
from torch._subclasses import FakeTensorMode

from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("the CPU sums bytes in host memory")

PART = 4096  # bytes of the longest parts that are summed side by side, by three
SHORT_PART = 256
LAST = 2**32 - 1
EVERY_LEVEL = pytest.mark.parametrize("level", simd_levels())


def reference(data: bytes, crc: int = 0) -> int:
    crc ^= LAST
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ LAST


def in_memory(data: bytes, *, after: int = 0) -> Tensor:
    """The bytes in a tensor that begins so many bytes after an address that 64 divides."""
    memory = torch.empty(len(data) + 128, dtype=torch.uint8)
    begin = -memory.data_ptr() % 64 + after
    placed = memory[begin : begin + len(data)]
    placed.copy_(torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)])
    assert placed.data_ptr() % 64 == after % 64 or not data
    return placed


VECTORS = {
    "zeros": (bytes(32), 0x8A9136AA),
    "ones": (b"\xff" * 32, 0x62A8AB43),
    "ascending": (bytes(range(32)), 0x46DD794E),
    "descending": (bytes(reversed(range(32))), 0x113FDB5C),
    "check": (b"123456789", 0xE3069283),
    "nothing": (b"", 0),
}


@EVERY_LEVEL
@pytest.mark.parametrize("name", VECTORS)
def test_values_of_rfc_3720(name: str, level: int) -> None:
    """Its appendix B.4, and the check value of catalogues of checksums."""
    data, expected = VECTORS[name]
    assert reference(data) == expected
    with simd(level):
        assert ops.crc32c(in_memory(data)) == expected


@EVERY_LEVEL
def test_every_length_to_100_at_every_alignment(level: int) -> None:
    data = random.Random(1).randbytes(100)
    expected = [reference(data[:length]) for length in range(101)]
    with simd(level):
        for after in range(9):
            memory = in_memory(data, after=after)
            assert [ops.crc32c(memory[:length]) for length in range(101)] == expected


@pytest.fixture(scope="module")
def long_data() -> tuple[bytes, list[int]]:
    """Bytes, and the sum of each number of the first of them."""
    data = random.Random(2).randbytes(2 * 3 * PART + 3 * SHORT_PART + 20)
    sums = [0]
    for i in range(len(data)):
        sums.append(reference(data[i : i + 1], sums[-1]))
    return data, sums


@EVERY_LEVEL
def test_lengths_about_the_parts_side_by_side(
    level: int, long_data: tuple[bytes, list[int]]
) -> None:
    data, sums = long_data
    wholes = [3 * SHORT_PART, 2 * 3 * SHORT_PART, PART, 3 * PART, 2 * 3 * PART]
    lengths = [whole + d for whole in wholes for d in range(-9, 10)]
    lengths += [3 * PART + 3 * SHORT_PART + d for d in (-8, -1, 0, 1, 8)]
    lengths += [random.Random(level).randrange(len(data)) for _ in range(50)]
    with simd(level):
        for after in (0, 1, 7):
            memory = in_memory(data, after=after)
            for length in lengths:
                assert ops.crc32c(memory[:length]) == sums[length], (length, after)


@EVERY_LEVEL
def test_sums_of_pieces_in_turn_are_the_sum_of_the_whole(
    level: int, long_data: tuple[bytes, list[int]]
) -> None:
    data, sums = long_data
    memory = in_memory(data)
    draw = random.Random(3)
    with simd(level):
        for pieces in (2, 3, 10, 50):
            ends = sorted(draw.randrange(len(data) + 1) for _ in range(pieces - 1))
            crc = 0
            for begin, end in zip([0, *ends], [*ends, len(data)], strict=True):
                crc = ops.crc32c(memory[begin:end], crc)
            assert crc == sums[-1]


@EVERY_LEVEL
@pytest.mark.parametrize("crc", [0, 1, 0x80000000, LAST])
def test_any_sum_may_come_before(level: int, crc: int) -> None:
    data = random.Random(4).randbytes(3 * SHORT_PART + 13)
    with simd(level):
        assert ops.crc32c(in_memory(data), crc) == reference(data, crc)
        assert ops.crc32c(in_memory(b""), crc) == crc


DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16, torch.uint64),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_memory_of_every_dtype_is_summed(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    data = bytes(random.Random(5).choices([0, 1], k=6 * size))
    words = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(2, 3)
    assert ops.crc32c(words) == reference(data)
    assert ops.crc32c(words[1]) == reference(data[3 * size :])
    assert ops.crc32c(words[1, 1]) == reference(data[4 * size : 5 * size])


def test_the_op_gives_an_int64_scalar_without_gradient() -> None:
    result = torch.ops.dynemb.crc32c(torch.ones(3, requires_grad=True), LAST)
    assert (result.dtype, result.shape, result.requires_grad) == (torch.int64, (), False)


ON_ANOTHER_DEVICE = r"but crc32c sums bytes in host memory: copy to the CPU first, with \.cpu\(\)"


@pytest.mark.parametrize("key", ["CPU", "CUDA"])
def test_the_kernel_refuses_what_is_not_on_the_cpu(key: str) -> None:
    """The one for CUDA tensors, too, which a build without CUDA kernels has."""
    kernel = torch.ops.dynemb.crc32c.default._op_dk
    with pytest.raises(RuntimeError, match=f"data is on another device, {ON_ANOTHER_DEVICE}"):
        kernel(getattr(torch._C.DispatchKey, key), torch.zeros(3, device="meta"), 0)


@pytest.mark.traced
def test_a_traced_call_says_the_same() -> None:
    with FakeTensorMode():
        assert torch.ops.dynemb.crc32c(torch.zeros(3), 0).shape == ()
        with pytest.raises(RuntimeError, match=f"crc32c: data is on cuda:0, {ON_ANOTHER_DEVICE}"):
            torch.ops.dynemb.crc32c(torch.zeros(3, device="cuda:0"), 0)
        with pytest.raises(RuntimeError, match="crc32c: crc is -1, expected 0 to 4294967295"):
            torch.ops.dynemb.crc32c(torch.zeros(3), -1)


@pytest.mark.traced
def test_compiled_as_one_graph() -> None:
    """The sum of one tensor goes on with another's: crc is a number of the program."""

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def sums(data: Tensor) -> Tensor:
        doubled = data * 2
        return torch.stack([torch.ops.dynemb.crc32c(doubled, crc) for crc in (0, 7)])

    for count in (5, 1000):
        data = torch.arange(count)
        doubled = (data * 2).numpy().tobytes()
        assert sums(data).tolist() == [reference(doubled), reference(doubled, 7)]


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """How long a Python thread keeps the interpreter's lock that it does not give away."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_other_threads_run_meanwhile() -> None:
    """The interpreter's lock is free during the op.

    A thread waits for the lock, which the calling thread keeps unless what it calls gives it away:
    zlib's sum of a short block does not.
    """
    block = torch.zeros(1 << 20, dtype=torch.uint8)
    op = torch.ops.dynemb.crc32c
    op(block, 0)
    begin = threading.Lock()
    begin.acquire()
    ran: list[bool] = []

    def wait_and_run() -> None:
        with begin:
            ran.append(True)

    other = threading.Thread(target=wait_and_run)
    with switch_interval(1e6):
        other.start()  # comes back when the other thread waits for `begin`
        begin.release()
        for _ in range(1000):
            zlib.crc32(b"short")
        assert not ran
        end = time.monotonic() + 60
        while not ran and time.monotonic() < end:
            op(block, 0)
        assert ran
    other.join()
