"""Scale: a table is trained on ids that are all new, until it has 100 million of them.

Rows of 8 columns in bfloat16, row-wise Adagrad. Every step brings a batch of new ids, so the table
grows all the time. Times are by tenth of the ids, growths of the index included.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common.command import is_selected, parser, positive
from common.id_streams import distinct_ids
from common.progress import progress
from common.report import Report, Row, quantity
from common.resident import resident_bytes
from common.timing import elapsed_ms

import torch_dynemb as td
from torch_dynemb.ops.columns import Table

BENCH = "scale"
DIM, BATCH = 8, 1 << 16
TENTHS = 10
MEAN = "time an id of all ids, in that of the first tenth"
MEMORY = "resident memory"
MEAN_TARGET = 1.3
MEMORY_TARGET = 24e9 / 100e6  # bytes an id: 100 million in 24 GB
CASES = ("time an id, by tenth", MEAN, MEMORY)


class Training:
    """Training of a table on new ids only.

    Args:
        batch: ids of a step.
    """

    def __init__(self, batch: int) -> None:
        self.module = td.DynamicEmbedding(
            DIM, name="scale", dtype=torch.bfloat16, optimizer=td.RowWiseAdagrad(lr=0.01)
        )
        self._gradient = torch.ones(batch, DIM)

    def step(self, ids: torch.Tensor) -> None:
        """Train one step."""
        self.module(ids).backward(self._gradient[: len(ids)])
        self.module.optimizer.step()

    @property
    def growths(self) -> int:
        """How often the index has grown."""
        return int(self.module.group.index.tables[0, Table.GROWTHS])


def rows(ids: int, batch: int) -> Iterator[Row | str]:
    """Yield the name of each part as it starts, then its row."""
    before = resident_bytes()
    training = Training(batch)
    times_ms: list[float] = []
    for tenth in range(TENTHS):
        begin, end = ids * tenth // TENTHS, ids * (tenth + 1) // TENTHS
        yield f"ids {begin:,} to {end:,}"
        growths = training.growths
        steps_ms = []
        for first in progress(range(begin, end, batch), "steps", depth=2):
            some = distinct_ids(first, min(batch, end - first))
            steps_ms.append(elapsed_ms(lambda some=some: training.step(some)))
        times_ms.append(sum(steps_ms))
        yield quantity(
            BENCH,
            f"time an id, tenth {tenth + 1} of {TENTHS}",
            times_ms[-1] / (end - begin) * 1e6,
            "ns",
            ids=end,
            batch=batch,
            growths=training.growths - growths,
            longest_step_ms=max(steps_ms),
        )
    mean, first_mean = sum(times_ms) / ids, times_ms[0] / (ids // TENTHS)
    threads = torch.get_num_threads()
    yield quantity(
        BENCH, MEAN, mean / first_mean, "times", target=MEAN_TARGET, ids=ids, threads=threads
    )
    resident = (resident_bytes() - before) / ids
    counted = training.module.memory()["total"] / ids
    yield quantity(
        *(BENCH, MEMORY, resident, "bytes an id"),
        target=MEMORY_TARGET,
        ids=ids,
        counted_bytes_an_id=counted,
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="ids in the end (default 100,000,000)")
    arguments.add_argument("--batch", type=positive, default=BATCH, help="ids of a step")
    options = arguments.parse_args()
    ids = options.ids or (2_000_000 if options.quick else 100_000_000)
    report = Report(as_json=options.json, cases=TENTHS + 2)
    if any(is_selected(options.only, case, "target") for case in CASES):
        report.take(rows(ids, options.batch))
    report.close()


if __name__ == "__main__":
    main()
