"""The emulator that runs CUDA kernels on the CPU: it gives CUDA's results and notices bugs."""

from __future__ import annotations

import ctypes
import functools
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulator import mode
from emulator.build import EMULATOR, build_library
from emulator.mode import declare

pytestmark = pytest.mark.cpu_only("the emulator itself")

SEEDS = [0, 1, 2]


@pytest.fixture(scope="module")
def library_path() -> Path:
    sources = [EMULATOR / "selftest.cpp"]
    return build_library("emulator_selftest", sources, compile_flags=[], link_flags=[])


@pytest.fixture
def kernels(library_path: Path) -> ctypes.CDLL:
    loaded = declare(ctypes.CDLL(str(library_path)))
    loaded.emulator_set_seed(0)
    return loaded


def test_settings_wait_for_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests on a real GPU set orders of threads, too; compiling an emulator takes minutes."""

    def build() -> Path:
        raise FileNotFoundError

    monkeypatch.setattr(mode, "build", build)
    monkeypatch.setattr(mode, "_settings", {})
    monkeypatch.setattr(mode, "library", functools.cache(mode.library.__wrapped__))
    mode.set_seed(5)
    mode.set_capturing(False)
    mode.set_memory_limit(None)
    with pytest.raises(FileNotFoundError):
        mode.launches()


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize("seed", SEEDS)
def test_block_reduction(kernels: ctypes.CDLL, seed: int) -> None:
    kernels.emulator_set_seed(seed)
    before = kernels.emulator_launches()
    values = torch.randint(-(1 << 40), 1 << 40, (5, 128))
    sums = torch.zeros(5, dtype=torch.int64)
    largest = torch.full((), -(1 << 62))
    kernels.test_reduce_blocks(pointer(values), pointer(sums), pointer(largest), 5)
    torch.testing.assert_close(sums, values.sum(1) + (values % 2 != 0).sum(1))
    assert largest == values.max()
    assert kernels.emulator_launches() == before + 1


def test_shared_memory_is_filled_before_a_block(kernels: ctypes.CDLL) -> None:
    word = ctypes.c_uint()
    for byte in (0x00, 0xA5):
        kernels.emulator_set_fill(byte)
        kernels.test_write_shared(1, ctypes.byref(word))  # and reads the first word
        assert word.value == 0x01010101 * byte


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_exchange_values(kernels: ctypes.CDLL, seed: int) -> None:
    kernels.emulator_set_seed(seed)
    values = torch.arange(32, dtype=torch.float32)
    sums = torch.zeros(32)
    votes = torch.zeros(32, dtype=torch.int32)
    kernels.test_sum_groups(pointer(values), pointer(sums), pointer(votes))
    groups = values.view(4, 8).sum(1) * torch.arange(1, 5)
    torch.testing.assert_close(sums, groups.repeat_interleave(8))
    ends = 1 | sum(1 << lane for lane in range(7, 32, 8))
    same = [sum(1 << other for other in range(lane % 4, 32, 4)) for lane in range(32)]
    assert [word & 0xFFFFFFFF for word in votes.tolist()] == [ends ^ word for word in same]


def test_order_of_threads(kernels: ctypes.CDLL) -> None:
    def order(seed: int) -> list[int]:
        tickets = torch.empty(6 * 64, dtype=torch.int64)
        kernels.emulator_set_seed(seed)
        kernels.test_take_tickets(pointer(tickets), 6, 64)
        return tickets.tolist()

    ascending = list(range(6 * 64))
    assert order(0) == ascending
    assert order(1) != ascending
    assert sorted(order(1)) == ascending
    assert order(1) == order(1)
    assert order(1) != order(2)


def test_threads_interleave_at_atomic_operations(kernels: ctypes.CDLL) -> None:
    assert kernels.test_lost_updates(256) == 0
    kernels.emulator_set_seed(1)
    assert kernels.test_lost_updates(256) > 0


@pytest.mark.parametrize(("begin", "end"), [(0, 64), (3, 7), (32, 64), (5, 5)])
def test_sort(kernels: ctypes.CDLL, begin: int, end: int) -> None:
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (1000,))
    values = torch.arange(1000, dtype=torch.int32)
    keys_out, values_out = torch.empty_like(keys), torch.empty_like(values)
    tensors = [pointer(tensor) for tensor in (keys, keys_out, values, values_out)]
    assert kernels.test_sort(*tensors, ctypes.c_int64(1000), begin, end) == 0
    unsigned = [key & (1 << 64) - 1 for key in keys.tolist()]
    mask = (1 << (end - begin)) - 1
    expected = sorted(range(1000), key=lambda i: unsigned[i] >> begin & mask)
    assert values_out.tolist() == expected
    assert torch.equal(keys_out, keys[expected])


def test_scan(kernels: ctypes.CDLL) -> None:
    counts = torch.randint(0, 1 << 40, (777,))
    exclusive, inclusive = counts.clone(), counts.clone()
    assert kernels.test_scan(pointer(exclusive), pointer(inclusive), ctypes.c_int64(777)) == 0
    assert torch.equal(inclusive, counts.cumsum(0))
    assert torch.equal(exclusive, inclusive - counts)


def test_virtual_memory(kernels: ctypes.CDLL) -> None:
    assert kernels.test_virtual_memory(0) == 0


@pytest.mark.parametrize("name", ["test_lazy_streams", "test_forked_capture"])
def test_streams(kernels: ctypes.CDLL, name: str) -> None:
    assert getattr(kernels, name)() == 0


def test_capture(kernels: ctypes.CDLL) -> None:
    assert kernels.test_capture() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("test_bug(0)", "deadlock.*in __syncthreads at .*selftest.cpp.*16 of 32 threads"),
        ("test_bug(1)", "deadlock.*in __syncwarp with mask 0xffffffff at .*selftest.cpp"),
        ("test_bug(2)", "different ones"),
        ("test_bug(3)", "lane is not in the mask"),
        ("test_bug(4)", "misaligned address"),
        ("test_virtual_memory(1)", ""),
    ],
)
def test_bugs_stop_the_process(library_path: Path, call: str, message: str) -> None:
    program = f"import ctypes; ctypes.CDLL({str(library_path)!r}).{call}"
    reply = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert reply.returncode == (-signal.SIGABRT if message else -signal.SIGSEGV)
    assert re.search(message, reply.stderr.replace("\n", " "))
