"""Read-only tables with rows in a file: p50 and p99 of lookups, against memory and RocksDB.

One table, D=64 float32; 256 x 10 ids a call, drawn by popularity, all known; caches of 5, 25 and
100 % of the rows. RocksDB has as many bytes of cache, and reads rows alone; it is left out if
librocksdb-dev is missing. Then live tables: lookups with changes in memory, and beside a thread
that updates rows, so that the file is written anew; ids updated a second. Then the first answer of
a process, and, where a cgroup of version 1 can be made, a process with a tenth of the rows' memory.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from common.command import is_selected, parser, positive
from common.id_streams import ZipfNumbers, distinct_ids
from common.report import Report, Row, compare, quantity
from common.timing import Timing, interleave_rounds
from peers.build import has_rocksdb
from peers.rocksdb_rows import RocksDBRows
from served.calls import Calls, medians, percentiles_99
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import serving

BENCH = "file_rows"
DIM, BATCH, LENGTH = 64, 256, 10
EXPONENTS, CACHED = (1.05, 1.2), (0.05, 0.25, 1.0)
MEMORY, PEER = "rows in memory", "RocksDB"
WARM_UP = 2  # rounds
THREADS = 8  # of RocksDB; 1 and 32 are slower
FIRST = "seconds from an empty process's model to its first answer"
UPDATED = "updates, Zipf 1.05, 25 % cached"
UNCHANGED = "rows in a file that do not change"
HEADROOM = 0.05  # of the ids
MOST_CHANGED = 1024  # ids of an update
LIMITED = "memory a tenth of the file, Zipf 1.05"
CGROUPS = Path("/sys/fs/cgroup/memory")
LEAST_BYTES = 48 << 20  # for the process itself
CASES = 2 * 2 * len(EXPONENTS) * len(CACHED) + 8 + 2 + 4


class Tables:
    """A table in memory, its rows, and where copies of it may lie.

    Args:
        folder: of files.
        rows: of the table.
    """

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder, self.ids = folder, distinct_ids(0, rows)
        self.values = torch.randn(rows, DIM)
        self.module = td.DynamicEmbedding(DIM, name="rows", trainable=False)
        self.module.group.insert_or_assign("rows", self.ids, self.values)
        self.memory = td.freeze(self.module)

    def in_file(self, cached: float) -> nn.Module:
        """Return a copy with rows in a new file."""
        path = tempfile.mkdtemp(dir=self.folder)
        return td.freeze(self.module, storage=td.SSDStore(path, cache=cached))

    def in_rocksdb(self, cached: float) -> RocksDBRows:
        """Return a new database of the rows."""
        path = Path(tempfile.mkdtemp(dir=self.folder))
        database = RocksDBRows(path, 4 * DIM, cache_bytes=int(cached * self.values.nbytes))
        for part in torch.arange(len(self.ids)).split(1 << 16):
            database.write(self.ids[part], self.values[part].view(torch.uint8))
        database.settle()
        return database


class Requests:
    """A candidate that gets other ids in each call.

    Args:
        ids: of each call; candidates have the same.
        run: takes them.
    """

    def __init__(self, ids: Sequence[Tensor], run: Callable[[Tensor], object]) -> None:
        self._run, self._ids = run, iter(ids)

    def __call__(self) -> None:
        self._run(next(self._ids))


class RocksDBLookups:
    """A candidate that reads distinct ids."""

    def __init__(self, database: RocksDBRows) -> None:
        self._database = database
        self._out = torch.empty(BATCH * LENGTH, 4 * DIM, dtype=torch.uint8)

    def __call__(self, ids: Tensor) -> None:
        wanted = ids.unique()
        if self._database.read(wanted, self._out, threads=THREADS) != len(wanted):
            raise RuntimeError("RocksDB lacks rows")


def lookups(
    tables: Tables, exponent: float, cached: float, rounds: int, calls: int
) -> Iterator[Row]:
    """Yield rows of one cache and one distribution."""
    frozen = tables.in_file(cached)
    database = tables.in_rocksdb(cached) if has_rocksdb() else None
    candidates: dict[str, Callable[[Tensor], object]] = {
        "ours": frozen,
        MEMORY: tables.memory,
    }
    if database is not None:
        candidates[PEER] = RocksDBLookups(database)
    if cached == 1:  # otherwise the first calls fill a cache
        for run in candidates.values():
            for part in tables.ids.split(BATCH * LENGTH):
                run(part)
    numbers = ZipfNumbers(len(tables.ids), seed=1, exponent=exponent)
    asked = [tables.ids[numbers.draw(BATCH * LENGTH)] for _ in range(calls * (rounds + WARM_UP))]
    timed = {name: Calls(Requests(asked, run), calls) for name, run in candidates.items()}
    before = frozen.frozen_tables.stats()
    interleave_rounds(timed, rounds=rounds, warmup=WARM_UP)
    stats = frozen.frozen_tables.stats()
    if database is not None:
        database.close()
    case = f"Zipf {exponent:g}, {100 * cached:g} % cached"
    hits, misses = stats.hits - before.hits, stats.misses - before.misses
    missed = {"missed": round(misses / (hits + misses), 4)}
    for peer in [*candidates][1:]:
        for name, of in (("p50", medians), ("p99", percentiles_99)):
            both = [of(timed[one].rounds[WARM_UP:]) for one in ("ours", peer)]
            yield compare(BENCH, f"{case}, {name}", both[0], peer, both[1], **missed)


class Updates(threading.Thread):
    """A writer of a live table, which makes one update after another until it ends.

    Args:
        live: the table.
        tables: of its rows.
        changed: ids of an update.
    """

    def __init__(self, live: serving.LiveTables, tables: Tables, changed: int) -> None:
        super().__init__()
        self._live, self._tables, self._changed = live, tables, changed
        self._ending = threading.Event()

    def run(self) -> None:
        """Update rows that are drawn by their popularity."""
        numbers = ZipfNumbers(len(self._tables.ids), seed=2, exponent=EXPONENTS[0])
        while not self._ending.is_set():
            self.update(numbers.draw(self._changed))

    def update(self, numbers: Tensor) -> None:
        """Make one update."""
        self._live.update("rows", self._tables.ids[numbers], self._tables.values[numbers])

    def end(self) -> None:
        """Wait for the last update."""
        self._ending.set()
        self.join()


def updated(tables: Tables, rounds: int, calls: int) -> Iterator[Row]:
    """Yield lookups in live tables, and the rate of updates."""
    frozen = tables.in_file(CACHED[1])
    count = len(tables.ids)
    changed = min(MOST_CHANGED, count // 20)
    headroom = max(int(HEADROOM * count), 2 * changed)
    live = serving.live(frozen, headroom=headroom)
    (of,) = serving.live_tables(live).values()
    updates = Updates(of, tables, changed)
    shuffled = torch.randperm(count)
    for part in shuffled[: headroom // 2].split(changed):
        updates.update(part)
    numbers = ZipfNumbers(count, seed=1, exponent=EXPONENTS[0])
    asked = [
        tables.ids[numbers.draw(BATCH * LENGTH)] for _ in range(2 * calls * (rounds + WARM_UP))
    ]
    asked, later = asked[::2], asked[1::2]
    timed = {
        "ours": Calls(Requests(asked, live), calls),
        UNCHANGED: Calls(Requests(asked, frozen), calls),
    }
    interleave_rounds(timed, rounds=rounds, warmup=WARM_UP)
    beside = Calls(Requests(later, live), calls)
    written = of.stats().files
    updates.start()
    interleave_rounds({"ours": beside}, rounds=rounds, warmup=WARM_UP)
    updates.end()
    written = of.stats().files - written
    for name, percentile in (("p50", medians), ("p99", percentiles_99)):
        both = [percentile(timed[one].rounds[WARM_UP:]) for one in ("ours", UNCHANGED)]
        yield compare(
            BENCH, f"{UPDATED}: half of the headroom, {name}", both[0], UNCHANGED, both[1]
        )
        taken = percentile(beside.rounds[WARM_UP:])
        yield compare(BENCH, f"{UPDATED}: beside a writer, {name}", taken, None, None)
    yield quantity(BENCH, f"{UPDATED}: files written beside these lookups", written, "files")
    in_memory, anew = list[float](), list[float]()
    for part in shuffled.split(changed):
        before, begin = of.stats().files, time.perf_counter()
        updates.update(part)
        taken_s = time.perf_counter() - begin
        (in_memory if of.stats().files == before else anew).append(taken_s)
    rate = changed * len(in_memory) / sum(in_memory)
    yield quantity(BENCH, f"{UPDATED}: ids into memory", rate, "a second")
    if anew:
        size = tables.values.nbytes / 1e6
        seconds = sum(anew) / len(anew)
        yield quantity(BENCH, f"{UPDATED}: a file written anew", seconds, "s", megabytes=size)
        whole = changed * (len(in_memory) + len(anew)) / (sum(in_memory) + sum(anew))
        yield quantity(BENCH, f"{UPDATED}: ids in all", whole, "a second")


def first_answers(tables: Tables) -> Iterator[Row]:
    """Yield the time to open a copy and answer, in a file and in memory."""
    frozen = tables.in_file(0.05)
    taken = {}
    for name, model in (("file", frozen), ("memory", tables.memory)):
        path = tables.folder / f"{name}.pickle"
        with path.open("wb") as file:
            pickle.dump((model, tables.ids[: BATCH * LENGTH]), file, protocol=5)
        taken[name] = Timing((1e3 * float(_child("first", path)["first_s"]),))
    yield compare(BENCH, FIRST, taken["file"], MEMORY, taken["memory"])


def limited(tables: Tables, calls: int) -> Iterator[Row]:
    """Yield what a process answers that has a tenth of the memory of the file."""
    size = tables.values.nbytes
    frozen = tables.in_file(0.05)
    path = tables.folder / "limited.pickle"
    with path.open("wb") as file:
        pickle.dump((frozen, tables.ids), file, protocol=5)
    allowed = max(size // 10, LEAST_BYTES)
    said = _child("limited", path, CGROUPS, allowed, calls)
    yield quantity(BENCH, f"{LIMITED}: memory of rows and index", said["bytes"] / size, "of rows")
    for name in ("p50", "p99"):
        yield compare(BENCH, f"{LIMITED}: {name}", Timing((said[name],)), None, None)
    yield quantity(BENCH, f"{LIMITED}: requests", said["requests"], "a second")


def _child(*arguments: object) -> dict[str, float]:
    program = Path(__file__).parent / "served" / "file_process.py"
    command = [sys.executable, str(program), *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def measured(folder: Path, ids: int, rounds: int, calls: int, only: list[str]) -> Iterator[Row]:
    """Yield the rows of all cases."""
    tables = Tables(folder, ids)
    for exponent in EXPONENTS:
        for cached in CACHED:
            if is_selected(only, f"Zipf {exponent:g}, {100 * cached:g} % cached", PEER):
                yield from lookups(tables, exponent, cached, rounds, calls)
                gc.collect()
    if is_selected(only, UPDATED, UNCHANGED):
        yield from updated(tables, rounds, calls)
        gc.collect()
    if is_selected(only, FIRST, MEMORY):
        yield from first_answers(tables)
    if os.access(CGROUPS, os.W_OK) and is_selected(only, LIMITED, MEMORY):
        yield from limited(tables, calls)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="of the table (default 2,000,000)")
    arguments.add_argument("--calls", type=positive, help="of a round (default 200)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    report = Report(as_json=options.json, cases=CASES)
    ids = options.ids or (2000 if options.quick else 2_000_000)
    calls = options.calls or (20 if options.quick else 200)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        of = measured(Path(folder), ids, options.rounds, calls, options.only)
        report.take(of)
    report.close()


if __name__ == "__main__":
    main()
