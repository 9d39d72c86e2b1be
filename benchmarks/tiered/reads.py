"""Random reads of 4 KB: ours, by io_uring and by threads, against fio's in the same way."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
from common.command import is_selected
from common.report import Row, compare, quantity
from common.timing import elapsed_ms, interleave_rounds

from torch_dynemb import ops

PAGE = 4096
THREADS = 32
AT_ONCE = 2048  # reads of a call, as many as a step may miss
RATE_TARGET = 1 / 0.9
# of fio, and the largest time of the processor for a read of ours
PEERS: dict[ops.IoPath, tuple[str, list[str], float]] = {
    ops.IoPath.URING: (
        "fio io_uring, depth 64",
        ["--ioengine=io_uring", "--iodepth=64"],
        5.0,
    ),
    ops.IoPath.THREADS: (
        f"fio psync, {THREADS} threads",
        ["--ioengine=psync", "--thread", f"--numjobs={THREADS}"],
        30.0,
    ),
}


def case(path: ops.IoPath) -> str:
    return f"random reads of 4 KB, {path.name.lower()}"


def read_rows(
    bench: str, folder: Path, megabytes: int, reads: int, rounds: int, only: list[str]
) -> Iterator[Row | str]:
    """Yield rates and CPU time of every available way of reading."""
    file = folder / "blocks"
    _fill(file, megabytes)
    _keep_freed_memory()
    for path in ops.store_io_paths():
        peer, options, most_us = PEERS[path]
        if not is_selected(only, case(path), peer):
            continue
        yield case(path)
        cpu: list[float] = []

        def ours(number: int, path: ops.IoPath = path, cpu: list[float] = cpu) -> float:
            draw = torch.Generator().manual_seed(number)
            offsets = torch.randint(megabytes << 20 >> 12, (reads,), generator=draw) * PAGE
            before = _cpu_seconds()
            elapsed = elapsed_ms(lambda: _read(file, offsets, path))
            cpu.append((_cpu_seconds() - before) / reads * 1e6)
            return elapsed

        def theirs(number: int, options: list[str] = options) -> float:
            return _fio_ms(file, reads, options, seed=number)

        timings = interleave_rounds({"ours": ours, "fio": theirs}, rounds=rounds, warmup=1)
        yield compare(
            bench,
            case(path),
            timings["ours"],
            peer,
            timings["fio"],
            target=RATE_TARGET,
            thousand_reads_a_second=reads / timings["ours"].median_ms,
            peer_thousand_reads_a_second=reads / timings["fio"].median_ms,
        )
        yield quantity(
            bench,
            f"processor's time for one of {case(path)}",
            sorted(cpu[1:])[(len(cpu) - 1) // 2],
            "us",
            target=most_us,
        )


def random_reads_per_second(folder: Path, *, megabytes: int = 512, reads: int = 50_000) -> float:
    """Return random reads of 4 KB that fio does in a second, by io_uring at depth 64.

    Args:
        folder: on the disk.
        megabytes: of a file, which is removed.
        reads: that are timed.
    """
    file = folder / "fio"
    _fill(file, megabytes)
    try:
        return reads / _fio_ms(file, reads, PEERS[ops.IoPath.URING][1], seed=0) * 1e3
    finally:
        file.unlink()


def _read(file: Path, offsets: torch.Tensor, path: ops.IoPath) -> None:
    for part in offsets.split(AT_ONCE):
        ops.read_blocks(file, part, block_bytes=PAGE, io=path)


def _fill(file: Path, megabytes: int) -> None:
    """Fill the file with random bytes: unwritten ones would be read without the disk."""
    with file.open("wb") as to:
        for _ in range(megabytes):
            to.write(os.urandom(1 << 20))
        to.flush()
        os.fsync(to.fileno())
        os.posix_fadvise(to.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _keep_freed_memory() -> None:
    """Give results the memory of earlier ones, as in a cache, so that no page is cleared."""
    m_mmap_threshold, m_trim_threshold, most = -3, -1, 1 << 25
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(m_mmap_threshold, most)
        libc.mallopt(m_trim_threshold, 4 * most)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _fio_ms(file: Path, reads: int, options: list[str], *, seed: int) -> float:
    """Return milliseconds of so many reads, as fio measures them, without its start."""
    threads = next((int(o.partition("=")[2]) for o in options if "numjobs" in o), 1)
    command = ["fio", "--name=reads", f"--filename={file}", "--rw=randread", "--bs=4k"]
    command += ["--direct=1", "--norandommap", f"--randseed={seed + 1}", "--output-format=json"]
    command += [f"--io_size={max(1, reads // threads) * PAGE}", "--group_reporting", *options]
    reply = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    read = json.loads(reply[reply.index("{") :])["jobs"][0]["read"]
    return float(reads / read["iops"] * 1e3)
