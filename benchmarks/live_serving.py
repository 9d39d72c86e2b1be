"""Live tables, which are updated while they are read, against frozen ones.

Bags of 20 ids of one table, on one thread, without updates and beside a thread that updates as
fast as it can. Rows of the live tables are as the frozen model's, or int8.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from common.command import is_selected, parser, positive
from common.id_streams import distinct_ids
from common.report import Report, Row, compare
from common.timing import interleave

import torch_dynemb as td
from torch_dynemb import serving

BENCH = "live_serving"
BAG = 20
PEER = "frozen, fp32"
UPDATED_AT_ONCE = 256


@dataclass(frozen=True)
class Case:
    """A lookup of ``batch`` bags of rows of ``dim`` columns, stored as ``rows``."""

    dim: int
    rows: str
    batch: int
    updated: bool

    @property
    def name(self) -> str:
        """As rows and ``--only`` have it."""
        meanwhile = "while rows are updated" if self.updated else "no updates"
        return f"{self.rows} rows, D={self.dim}, {self.batch} bags of {BAG}, {meanwhile}"


def bag_of(ids: torch.Tensor, dim: int) -> td.DynamicEmbeddingBag:
    """Return a bag with these ids in its table."""
    bag = td.DynamicEmbeddingBag(dim, mode="sum", optimizer=td.SGD(lr=0.1), name="ads")
    for some in ids.split(1 << 16):
        bag.group.insert_or_assign(0, some, torch.randn(len(some), dim))
    return bag


@contextmanager
def updates(tables: serving.LiveTables, ids: torch.Tensor, dim: int) -> Iterator[list[int]]:
    """Replace rows in a thread, one update after another; yield a counter of them."""
    stop, done = threading.Event(), [0]
    rows = torch.randn(UPDATED_AT_ONCE, dim)

    def update() -> None:
        while not stop.is_set():
            begin = done[0] % (len(ids) - UPDATED_AT_ONCE)
            tables.update("ads", ids[begin : begin + UPDATED_AT_ONCE], rows)
            done[0] += UPDATED_AT_ONCE

    thread = threading.Thread(target=update)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()


def serving_row(case: Case, ids: int, rounds: int) -> Row:
    """Return a live lookup against a frozen one of the same bags."""
    torch.manual_seed(0)
    known = distinct_ids(0, ids)
    frozen = td.freeze(bag_of(known, case.dim))
    live = serving.live(frozen, headroom=1000, rows=case.rows)
    (tables,) = serving.live_tables(live).values()
    bags = [known[torch.randint(0, ids, (case.batch, BAG))] for _ in range(16)]
    count = case.batch * BAG
    calls = max(1, 100_000 // count)
    candidates = {
        "live": lambda call: live(bags[call % len(bags)]),
        "frozen": lambda call: frozen(bags[call % len(bags)]),
    }
    if case.updated:
        with updates(tables, known, case.dim):
            timings = interleave(candidates, rounds=rounds, calls=calls)
    else:
        timings = interleave(candidates, rounds=rounds, calls=calls)
    return compare(
        BENCH,
        case.name,
        timings["live"],
        PEER,
        timings["frozen"],
        target=None,
        live_ns_an_id=timings["live"].median_ms * 1e6 / count,
        frozen_ns_an_id=timings["frozen"].median_ms * 1e6 / count,
    )


def rows(cases: list[Case], ids: int, rounds: int) -> Iterator[Row | str]:
    """Yield the name of each case as it starts, then its row."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for case in cases:
        yield case.name
        yield serving_row(case, ids, rounds)
    torch.set_num_threads(threads)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="ids of a table (default 1,000,000)")
    options = arguments.parse_args()
    ids = options.ids or (20_000 if options.quick else 1_000_000)
    cases = [
        Case(dim, form, batch, updated)
        for updated in (False, True)
        for dim in (16, 64)
        for form in ("fp32", "int8")
        for batch in (1, 256)
    ]
    cases = [case for case in cases if is_selected(options.only, case.name, PEER)]
    report = Report(as_json=options.json, cases=len(cases))
    report.take(rows(cases, ids, options.rounds))
    report.close()


if __name__ == "__main__":
    main()
