"""Rows set from outside: new ids against the same ids once more, when they are known.

Rows of D=16 come in batches through ``insert_or_assign``, as a loading program gives them.
They go into an empty table with an index that grows, or into a table reserved for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from common.command import is_selected, parser, positive
from common.id_streams import distinct_ids
from common.report import Report, Row, compare
from common.timing import elapsed_ms, interleave_rounds

import torch_dynemb as td
from torch_dynemb.optim import OptimizerConfig

BENCH = "assign"
DIM = 16
KNOWN = "the same ids, known"
TARGET = 2.0
OPTIMIZERS: dict[str, OptimizerConfig] = {"SGD": td.SGD(lr=0.1), "Adam": td.Adam(lr=0.01)}


@dataclass(frozen=True)
class Case:
    """Size of a comparison: ``batch`` ids a call, on ``threads`` threads."""

    optimizer: str
    batch: int
    threads: int
    reserved: bool

    @property
    def name(self) -> str:
        """As rows and ``--only`` have it."""
        table = "reserved" if self.reserved else "empty"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"new ids, {table} table, {self.optimizer}, batches of {self.batch:,}, {threads}"


class Assignment:
    """Assignment of rows to all ids, once or again.

    Args:
        case: the table and its batches.
        ids: how many there are.
    """

    def __init__(self, case: Case, ids: int) -> None:
        self._case = case
        self._ids = distinct_ids(0, ids).split(case.batch)
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randn(ids, DIM, generator=generator).split(case.batch)
        self._filled = self._empty()
        self._assign()

    def _empty(self) -> td.TableGroup:
        optimizer = OPTIMIZERS[self._case.optimizer]
        group = td.TableGroup([td.TableConfig("bench", DIM)], optimizer=optimizer)
        if self._case.reserved:
            group.reserve(0, sum(len(ids) for ids in self._ids))
        return group

    def _assign(self) -> None:
        for ids, rows in zip(self._ids, self._rows, strict=True):
            self._filled.insert_or_assign(0, ids, rows)

    def new(self, _: int) -> float:
        """Return milliseconds for all ids in a table without them."""
        self._filled = self._empty()
        return elapsed_ms(self._assign)

    def known(self, _: int) -> float:
        """Return milliseconds for all ids in the table that has them."""
        return elapsed_ms(self._assign)


def assign_row(case: Case, ids: int, rounds: int) -> Row:
    """Compare new ids with known ones."""
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    assignment = Assignment(case, ids)
    timings = interleave_rounds(
        {"new": assignment.new, "known": assignment.known}, rounds=rounds, warmup=1
    )
    torch.set_num_threads(threads)
    return compare(
        BENCH,
        case.name,
        timings["new"],
        KNOWN,
        timings["known"],
        target=TARGET,
        ids=ids,
        new_m_per_s=ids / timings["new"].median_ms / 1e3,
        known_m_per_s=ids / timings["known"].median_ms / 1e3,
    )


def rows(cases: list[Case], ids: int, rounds: int) -> Iterator[Row | str]:
    """Yield the name of each case as it starts, then its row."""
    for case in cases:
        yield case.name
        yield assign_row(case, ids, rounds)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="ids of a table (default 2,000,000)")
    arguments.add_argument("--threads", type=positive, help="threads (default: 1, and all)")
    options = arguments.parse_args()
    ids = options.ids or (200_000 if options.quick else 2_000_000)
    threads = [options.threads] if options.threads else sorted({1, torch.get_num_threads()})
    cases = [
        Case(optimizer, batch, count, reserved)
        for count in threads
        for optimizer in OPTIMIZERS
        for batch in (min(100_000, ids // 2), min(1_000_000, ids))
        for reserved in (False, True)
    ]
    cases = [case for case in cases if is_selected(options.only, case.name, KNOWN)]
    report = Report(as_json=options.json, cases=len(cases))
    report.take(rows(cases, ids, options.rounds))
    report.close()


if __name__ == "__main__":
    main()
