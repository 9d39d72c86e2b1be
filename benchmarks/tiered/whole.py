"""A whole table with rows in files: its snapshots, and the memory it takes beside the cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

from common.command import is_selected
from common.report import Row, compare, quantity
from common.timing import elapsed_ms, interleave_rounds
from tiered.training import DIM
from training.variants import train_all

import torch_dynemb as td

PEER = "sequential write and fdatasync of the same bytes"
SNAPSHOT_TARGET = 1 / 0.7
AN_ID = 12  # bytes, beside those of the index
PIECE = 1 << 20
STEP = 1 << 16  # ids


def _table(path: Path, cache: str) -> td.DynamicEmbeddingBag:
    return td.DynamicEmbeddingBag(
        DIM,
        mode="sum",
        name="bench",
        optimizer=td.Adam(lr=0.01),
        storage=td.SSDStore(path, cache=cache),
    )


def snapshot_rows(
    bench: str, folder: Path, ids: int, rounds: int, only: list[str]
) -> Iterator[Row | str]:
    """Write a snapshot of a table with all rows changed and in the cache."""
    case = f"snapshot, Adam D={DIM}, all rows changed"
    if not is_selected(only, case, PEER):
        return
    yield case
    with tempfile.TemporaryDirectory(dir=folder) as path:
        bag = _table(Path(path) / "rows", f"{ids} rows")
        written: list[int] = []

        def ours(number: int) -> float:
            train_all(bag, ids, STEP)
            stats = bag.group.usage.storage()
            assert stats is not None
            before = stats.bytes_written
            elapsed = elapsed_ms(lambda: td.checkpoint.save_snapshot(bag, f"of{number}"))
            after = bag.group.usage.storage()
            assert after is not None
            written.append(after.bytes_written - before + bag.group.usage.memory()["index"])
            return elapsed

        def plain(number: int) -> float:
            return elapsed_ms(lambda: _write(Path(path) / "plain", written[-1]))

        ours(-1)  # the peer writes as much as it did
        timings = interleave_rounds({"ours": ours, "peer": plain}, rounds=rounds, warmup=1)
        yield compare(
            bench,
            case,
            timings["ours"],
            PEER,
            timings["peer"],
            target=SNAPSHOT_TARGET,
            megabytes_a_second=written[-1] / timings["ours"].median_ms / 1e3,
            peer_megabytes_a_second=written[-1] / timings["peer"].median_ms / 1e3,
            ids=ids,
        )


def _write(path: Path, size: int) -> None:
    """Write as the store does: past the memory of the system, a piece after the other."""
    piece = mmap(-1, PIECE)  # its address is that of a page
    piece.write(os.urandom(PIECE))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    try:
        for _ in range(-(-size // PIECE)):
            os.write(file, piece)
        os.fdatasync(file)
    finally:
        os.close(file)
        path.unlink()


def memory_rows(bench: str, folder: Path, ids: int, only: list[str]) -> Iterator[Row | str]:
    """Yield memory of a table beyond its cache and its index, an id."""
    case = f"memory of a table in files beyond index and cache, {ids} ids"
    if not is_selected(only, case, "target"):
        return
    yield case
    with tempfile.TemporaryDirectory(dir=folder) as path:
        before = _resident()
        bag = _table(Path(path) / "rows", "10000 rows")
        train_all(bag, ids, 4096)
        tiers = bag.group.tables.tiers
        assert tiers is not None
        tiers.drain()
        slots = tiers.used_slots(0)
        row_bytes = 4 * 3 * DIM + 4 + 32  # weights, two states, generation, slot
        index = bag.group.usage.memory()["index"]
        beyond = _resident() - before - index - slots * row_bytes
        yield quantity(bench, case, beyond / ids, "bytes", target=AN_ID + (64 << 20) / ids, ids=ids)


def _resident() -> int:
    """Bytes of memory that the process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
