"""Growth: inserting ids into an empty table against a reserved one, stalls, memory.

Ids arrive in batches, a clock step each. Memory is that of a table after training on all
of its ids once: how much the resident set of the process has grown.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from common.command import is_selected, parser, positive
from common.dynamic_index import DynamicIndex
from common.id_streams import distinct_ids
from common.progress import progress
from common.report import Report, Row, compare, quantity
from common.resident import resident_bytes
from common.timing import elapsed_ms, interleave_rounds
from peers.index_limits import NAME, SLOTS, ReferenceIndex
from torch import Tensor

import torch_dynemb as td

BENCH = "growth"
BATCH = 1 << 20
STALL_BATCHES = 8  # growths of smaller tables drown in the batch's own time
INSERT, STALL, FAULTS, MEMORY, LIMIT = (
    "insert from empty",
    "stall of a growth step",
    "stall of a growth step, page faults apart",
    "resident memory",
    "a growth of the reference kernel, page faults apart",
)
LIMIT_IDS = 10_000_000  # at most
LOAD, GROWTH = 0.7, 1.45  # of our index when it grows, and by how much
RESERVED = "reserved table of ours"
INSERT_TARGET = 1.5
STALL_TARGET_NS = 10.0
MEMORY_DIM, MEMORY_BATCH = 64, 1 << 14
MEMORY_ROW_BYTES = MEMORY_DIM * 4 * 3  # weights and Adam's two moments
MEMORY_FACTOR, MEMORY_BYTES_AN_ID = 1.15, 44


@dataclass
class Batches:
    """Milliseconds of each batch of a run, and the growths among them."""

    times_ms: list[float] = field(default_factory=list)
    grown_at: list[int] = field(default_factory=list)  # batches that grew the table
    index_bytes: list[int] = field(default_factory=list)  # of the index after each batch

    def stalls_ms(self) -> dict[int, float]:
        """Return the time of each batch with a growth beyond a usual one, by batch."""
        grown = set(self.grown_at)
        usual = [ms for batch, ms in enumerate(self.times_ms) if batch not in grown]
        if not usual:
            raise ValueError(f"all {len(grown)} batches grew the table: give more ids (--ids)")
        return {batch: self.times_ms[batch] - statistics.median(usual) for batch in grown}


def insert_all(ids: int, batch_size: int, *, reserved: bool) -> Batches:
    """Insert ids into an empty or a reserved table; the ids themselves are made off the clock."""
    index = DynamicIndex()
    if reserved:
        index.reserve(ids)
    result = Batches()

    def insert(batch: Tensor) -> None:
        index.find_or_insert(batch)
        index.step()

    for first in progress(range(0, ids, batch_size), "batches", depth=2):
        batch = distinct_ids(first, min(batch_size, ids - first))
        growths = index.growths
        result.times_ms.append(elapsed_ms(lambda batch=batch: insert(batch)))
        result.index_bytes.append(index.used_bytes)
        if index.growths > growths:
            result.grown_at.append(len(result.times_ms) - 1)
    return result


def page_fault_ms(size_bytes: int) -> float:
    """Return milliseconds until the system has given ``size_bytes`` of zeroed memory."""
    memory = td.ops.reserve((size_bytes // 8,), torch.int64, huge_pages=True)
    return elapsed_ms(memory.zero_)


def stall_rows(runs: list[Batches], ids: int, batch_size: int) -> Iterator[Row]:
    """Yield the longest stall of all growths; of each growth the shortest round counts."""
    worst = {STALL: 0.0, FAULTS: 0.0}
    grown_at = [batch for batch in runs[0].grown_at if batch >= STALL_BATCHES]
    if not grown_at:
        return  # too few ids: a growth would drown in its batch
    for batch in grown_at:
        moved = batch * batch_size
        stall = min(run.stalls_ms()[batch] for run in runs)
        faults = min(page_fault_ms(runs[0].index_bytes[batch]) for _ in range(3))
        worst[STALL] = max(worst[STALL], stall / moved * 1e6)
        worst[FAULTS] = max(worst[FAULTS], (stall - faults) / moved * 1e6)
    for case, target in ((STALL, None), (FAULTS, STALL_TARGET_NS)):
        yield quantity(
            BENCH,
            case,
            worst[case],
            "ns an id",
            target=target,
            ids=ids,
            rounds=len(runs),
            growths=len(runs[0].grown_at),
        )


def insert_rows(ids: int, batch_size: int, rounds: int) -> Iterator[Row]:
    """Yield insertion from empty against reserved, and the stalls seen meanwhile."""
    runs: list[Batches] = []

    def from_empty(_: int) -> float:
        runs.append(insert_all(ids, batch_size, reserved=False))
        return sum(runs[-1].times_ms)

    timings = interleave_rounds(
        {
            "ours": from_empty,
            "peer": lambda _: sum(insert_all(ids, batch_size, reserved=True).times_ms),
        },
        rounds=rounds,
        warmup=0,
    )
    yield compare(
        BENCH,
        INSERT,
        timings["ours"],
        RESERVED,
        timings["peer"],
        target=INSERT_TARGET,
        ids=ids,
        threads=torch.get_num_threads(),
        ours_m_per_s=ids / timings["ours"].median_ms / 1e3,
    )
    yield from stall_rows(runs, ids, batch_size)


def limit_row(ids: int, rounds: int) -> Row:
    """Return the least time of reading an index in order and writing the larger one."""
    lines = int(ids / LOAD / SLOTS)
    small, large = ReferenceIndex(lines), ReferenceIndex(int(lines * GROWTH))
    for first in range(0, ids, BATCH):
        batch = distinct_ids(first, min(BATCH, ids - first))
        small.insert(batch, first_value=first + 1, threads=torch.get_num_threads())
    times_ms = []
    for _ in range(rounds):
        large.clear()
        times_ms.append(elapsed_ms(lambda: small.grow_into(large, threads=torch.get_num_threads())))
    return quantity(
        *(BENCH, LIMIT, min(times_ms) / ids * 1e6, "ns an id"),
        ids=ids,
        rounds=rounds,
        threads=torch.get_num_threads(),
    )


def memory_row(ids: int) -> Row:
    """Return resident bytes of a table with Adam after training each row once."""
    gradient = torch.ones(MEMORY_BATCH, MEMORY_DIM)

    def train(module: td.DynamicEmbedding, first: int) -> None:
        batch = distinct_ids(first, MEMORY_BATCH)
        module(batch).backward(gradient)
        module.optimizer.step()

    def table(name: str) -> td.DynamicEmbedding:
        return td.DynamicEmbedding(MEMORY_DIM, name=name, optimizer=td.Adam(lr=1e-3))

    # what a step allocates besides the table: the allocator keeps part of it resident
    scratch = table("scratch")
    for _ in range(8):
        train(scratch, 0)
    del scratch
    gc.collect()
    before = resident_bytes()
    module = table("memory")
    worst, resident, limit, seen = 0.0, 0, 1.0, 0
    for first in progress(range(0, ids, MEMORY_BATCH), "batches", depth=1):
        train(module, first)
        seen = first + MEMORY_BATCH
        resident = resident_bytes() - before
        limit = seen * (MEMORY_FACTOR * MEMORY_ROW_BYTES + MEMORY_BYTES_AN_ID)
        if seen >= ids // 8:
            worst = max(worst, resident / limit)
    return quantity(
        BENCH,
        MEMORY,
        resident / seen,
        "bytes an id",
        target=limit / seen,
        ids=seen,
        dim=MEMORY_DIM,
        row_and_state_bytes=MEMORY_ROW_BYTES,
        worst_ratio_while_growing=worst,
        counted_bytes_an_id=module.memory()["total"] / seen,
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="ids inserted (default 100,000,000)")
    arguments.add_argument("--batch", type=positive, help="ids of a batch (default 1,048,576)")
    arguments.add_argument(
        "--memory-ids", type=positive, help="ids of the memory case (default 4,000,000)"
    )
    arguments.add_argument("--threads", type=positive, default=2, help="threads (default 2)")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    ids = options.ids or (10_000_000 if options.quick else 100_000_000)
    batch = options.batch or (1 << 17 if options.quick else BATCH)
    memory_ids = options.memory_ids or (500_000 if options.quick else 4_000_000)
    report = Report(as_json=options.json, cases=5)
    if is_selected(options.only, MEMORY, "target"):  # first: a clean resident set
        report.start(MEMORY)
        report.add(memory_row(memory_ids))
    if is_selected(options.only, LIMIT, NAME):
        report.start(LIMIT)
        report.add(limit_row(min(ids, LIMIT_IDS), options.rounds))
    if any(is_selected(options.only, case, RESERVED) for case in (INSERT, STALL, FAULTS)):
        report.start(INSERT)
        report.take(insert_rows(ids, batch, options.rounds))
    report.close()


if __name__ == "__main__":
    main()
