"""Rows in files without a cache: reads and overwrites, against RocksDB, and what is written."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from common.command import is_selected
from common.id_streams import distinct_ids
from common.report import Row, compare, quantity
from common.timing import elapsed_ms, interleave_rounds
from peers.rocksdb_rows import RocksDBRows
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import StoreStat

HEADER = 24
ROW_BYTES = 512  # of a record
PAGE = 4096
SEGMENTS = 128  # at least, as a large table has: two are always free
READ_AT_ONCE = 2048
WRITTEN_AT_ONCE = 16_384
PEER_THREADS = (1, 8, 32)
READ_TARGET, OVERWRITE_TARGET = 1 / 2, 1 / 4
WORST_SECONDS = 0.3
# disk / live rows: bytes written for a byte of rows at most
AMPLIFICATION = {1.5: 1.7, 2.0: 1.25}


@dataclass(frozen=True)
class Sizes:
    """Rows there are, those read and those overwritten in a round, and rounds."""

    rows: int
    reads: int
    writes: int
    rounds: int


class Log:
    """The store of one table, which is written and read without its cache.

    Args:
        path: of its files.
        rows: that it has.
        disk: bytes of files at most, in those of the rows.
    """

    def __init__(self, path: Path, rows: int, disk: float) -> None:
        live = rows * ROW_BYTES
        segment = min(64 << 20, max(16 * PAGE, int(disk * live / SEGMENTS) // PAGE * PAGE))
        storage = td.SSDStore(path, cache="64 rows", disk=int(disk * live), segment=segment)
        dim = (ROW_BYTES - HEADER) // 4
        self._group = td.TableGroup([td.TableConfig("bench", dim, storage=storage)], optimizer=None)
        self.ids = distinct_ids(0, rows)
        self._handles = self._group.insert(0, self.ids)
        assert self._group.tables.tiers is not None
        self._clock = self._group.tables.tiers.tensors.clock

    def write(self, numbers: Tensor, records: Tensor) -> None:
        """Overwrite the rows of some numbers."""
        handles, ids = self._handles[numbers], self.ids[numbers]
        ops.store_write(self._clock, 0, handles, ids, 0, records)

    def read(self, numbers: Tensor) -> Tensor:
        """Return the records of some numbers."""
        return ops.store_read(self._clock, 0, self._handles[numbers], self.ids[numbers]).records

    def drain(self) -> None:
        """Wait until all is written but what is left in the buffer."""
        ops.store_drain(self._clock)

    @property
    def bytes_written(self) -> int:
        """To files, since it was opened."""
        return int(ops.store_stats(self._clock)[StoreStat.BYTES_WRITTEN])

    @property
    def disk_bytes(self) -> int:
        """Of its files."""
        return int(ops.store_stats(self._clock)[StoreStat.DISK_BYTES])


class Overwrites:
    """Numbers of rows to overwrite, and what to write, the same for all candidates.

    Args:
        sizes: of the measurement.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._rows = sizes.rows
        self._at_once = min(WRITTEN_AT_ONCE, sizes.writes)
        self._batches = max(1, sizes.writes // self._at_once)
        self.rows = self._batches * self._at_once
        self._records = torch.randint(256, (self._at_once, ROW_BYTES), dtype=torch.uint8)

    def all(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every row once."""
        for numbers in torch.arange(self._rows).split(self._at_once):
            yield numbers, self._records[: len(numbers)]

    def some(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield different rows in each batch, all equally likely."""
        draw = torch.Generator().manual_seed(seed)
        for _ in range(self._batches):
            numbers = torch.randint(self._rows, (self._at_once,), generator=draw).unique()
            yield numbers, self._records[: len(numbers)]


@contextmanager
def _database(folder: Path) -> Iterator[RocksDBRows]:
    with tempfile.TemporaryDirectory(dir=folder) as path:
        database = RocksDBRows(Path(path) / "db", ROW_BYTES)
        try:
            yield database
        finally:
            database.close()


def log_rows(bench: str, folder: Path, sizes: Sizes, only: list[str]) -> Iterator[Row | str]:
    """Yield the name of each case as it starts, then its rows."""
    reads, overwrites = f"random reads of {ROW_BYTES} bytes", f"overwrites of {ROW_BYTES} bytes"
    peer = "RocksDB"
    if is_selected(only, reads, peer) or is_selected(only, overwrites, peer):
        with tempfile.TemporaryDirectory(dir=folder) as path, _database(folder) as database:
            yield "rows are written"
            log, writes = Log(Path(path), sizes.rows, 1.5), Overwrites(sizes)
            for numbers, records in writes.all():
                log.write(numbers, records)
                database.write(log.ids[numbers], records)
            log.drain()
            database.settle()
            if is_selected(only, reads, peer):
                yield reads
                yield from _read_rows(bench, reads, log, database, sizes)
            if is_selected(only, overwrites, peer):
                yield overwrites
                yield from _overwrite_rows(bench, overwrites, log, database, writes, sizes)
            del log
    for disk, most in AMPLIFICATION.items():
        case = f"bytes written for a byte overwritten, files {disk:g} times the rows"
        if is_selected(only, case, "target"):
            yield case
            yield _amplification(bench, case, folder, sizes, disk, most)


def _read_rows(
    bench: str, case: str, log: Log, database: RocksDBRows, sizes: Sizes
) -> Iterator[Row]:
    out = torch.empty(READ_AT_ONCE, ROW_BYTES, dtype=torch.uint8)

    def numbers(number: int) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(number)
        return torch.randint(sizes.rows, (sizes.reads,), generator=draw).split(READ_AT_ONCE)

    def ours(number: int) -> float:
        parts = numbers(number)
        return elapsed_ms(lambda: [log.read(part) for part in parts])

    def theirs(number: int, threads: int) -> float:
        parts = [log.ids[part] for part in numbers(number)]

        def read() -> None:
            for part in parts:
                if database.read(part, out, threads=threads) != len(part):
                    raise RuntimeError("RocksDB has lost rows")

        return elapsed_ms(read)

    names = {f"RocksDB MultiGet, {t} threads": t for t in PEER_THREADS}
    peers = {name: lambda n, t=t: theirs(n, t) for name, t in names.items()}
    timings = interleave_rounds({"ours": ours} | peers, rounds=sizes.rounds, warmup=1)
    for name in names:
        yield compare(
            bench,
            case,
            timings["ours"],
            name,
            timings[name],
            target=READ_TARGET,
            thousand_reads_a_second=sizes.reads / timings["ours"].median_ms,
            peer_thousand_reads_a_second=sizes.reads / timings[name].median_ms,
            rows=sizes.rows,
        )


def _overwrite_rows(
    bench: str,
    case: str,
    log: Log,
    database: RocksDBRows,
    writes: Overwrites,
    sizes: Sizes,
) -> Iterator[Row]:
    worst = {"ours": 0.0, "RocksDB": 0.0}

    def ours(number: int) -> float:
        times = [elapsed_ms(lambda p=part: log.write(*p)) for part in writes.some(number)]
        worst["ours"] = max(worst["ours"], *times)
        return sum(times) + elapsed_ms(log.drain)

    def theirs(number: int) -> float:
        parts = [(log.ids[numbers], records) for numbers, records in writes.some(number)]
        times = [elapsed_ms(lambda p=part: database.write(*p)) for part in parts]
        worst["RocksDB"] = max(worst["RocksDB"], *times)
        # as ours: otherwise its compactions would be read and written in our rounds
        return sum(times) + elapsed_ms(database.drain)

    timings = interleave_rounds({"ours": ours, "RocksDB": theirs}, rounds=sizes.rounds, warmup=2)
    live = sizes.rows * ROW_BYTES
    yield compare(
        bench,
        case,
        timings["ours"],
        "RocksDB",
        timings["RocksDB"],
        target=OVERWRITE_TARGET,
        thousand_rows_a_second=writes.rows / timings["ours"].median_ms,
        peer_thousand_rows_a_second=writes.rows / timings["RocksDB"].median_ms,
        disk_of_live=log.disk_bytes / live,
        peer_disk_of_live=database.disk_bytes / live,
        peer_worst_batch_s=worst["RocksDB"] / 1e3,
        rows=sizes.rows,
    )
    yield quantity(
        bench,
        f"{case}: worst of batches of {WRITTEN_AT_ONCE}",
        worst["ours"] / 1e3,
        "s",
        target=WORST_SECONDS,
    )


def _amplification(
    bench: str, case: str, folder: Path, sizes: Sizes, disk: float, most: float
) -> Row:
    with tempfile.TemporaryDirectory(dir=folder) as path:
        log, writes = Log(Path(path), sizes.rows, disk), Overwrites(sizes)
        for batch in writes.all():
            log.write(*batch)
        settling = -(-2 * sizes.rows // writes.rows)
        rows = before = 0
        for number in range(2 * settling):
            if number == settling:
                log.drain()
                before = log.bytes_written
            for numbers, records in writes.some(number):
                log.write(numbers, records)
                rows += len(numbers) if number >= settling else 0
        log.drain()
        ratio = (log.bytes_written - before) / (rows * ROW_BYTES)
        return quantity(
            bench,
            case,
            ratio,
            "bytes",
            target=most,
            disk_of_live=log.disk_bytes / (sizes.rows * ROW_BYTES),
        )
