"""Training step by optimizer, dtype of rows and state, and mode; bytes of an id.

One table of 1 M rows, batch 4096, 20 ids a bag, sum pooling, 2 threads: forward, backward and
update. Every optimizer in float32 is set against a static peer that has it, and against our
row-wise Adagrad. Low precision and split mode are set against the same optimizer, float32, fused.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common.command import parser, positive
from common.report import Report
from training.comparisons import ADAM_TARGET, LIMIT_COMPARISONS, STATIC_COMPARISONS
from training.memory import memory_rows, memory_table
from training.steps import DRAWS, Comparison, add_size_arguments, sizes_of, step_rows
from training.variants import BASE, BFLOAT16, FLOAT16, OPTIMIZERS, Variant, state_dtypes

BENCH = "optimizers"
IN_DETAIL = ("RowWiseAdagrad", "Adam")  # all dtypes and modes of these
BFLOAT16_TARGET = 0.75  # of float32's time: row-wise Adagrad, D=128, uniform


def comparisons_of(optimizer: str) -> Iterator[Comparison]:
    """Yield all comparisons of an optimizer, those with its float32 table first."""
    plain = Variant(optimizer)
    yield from (static for static in STATIC_COMPARISONS if static.ours == plain)
    yield from (limit for limit in LIMIT_COMPARISONS if limit.ours.optimizer == optimizer)
    if optimizer != BASE:
        yield Comparison(plain, Variant(BASE), ADAM_TARGET if optimizer == "Adam" else {})
    yield Comparison(
        Variant(optimizer, rows=BFLOAT16),
        plain,
        {"uniform": BFLOAT16_TARGET} if optimizer == BASE else {},
        target_dim=128,
        everywhere=optimizer in IN_DETAIL,
    )
    if optimizer not in IN_DETAIL:
        return
    yield Comparison(Variant(optimizer, rows=BFLOAT16, stochastic=False), plain)
    yield Comparison(Variant(optimizer, rows=FLOAT16), plain)
    for state in state_dtypes(optimizer)[1:]:
        yield Comparison(Variant(optimizer, state=state), plain)
    for micro_batches in (1, 2):
        yield Comparison(Variant(optimizer, micro_batches=micro_batches), plain)


COMPARISONS = [comparison for name in OPTIMIZERS for comparison in comparisons_of(name)]


def main() -> None:
    arguments = parser(__doc__)
    add_size_arguments(arguments)
    arguments.add_argument(
        "--memory-ids", type=positive, help="ids of the table with counted bytes (default 100,000)"
    )
    arguments.add_argument(
        "--memory-table", action="store_true", help="only print bytes of an id, in Markdown"
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    memory_ids = options.memory_ids or (10_000 if options.quick else 100_000)
    if options.memory_table:
        print(memory_table(memory_ids))
        return
    sizes = sizes_of(options, calls=4)
    full = sum(comparison.everywhere for comparison in COMPARISONS)
    steps = full * len(DRAWS) * len(sizes.dims) + len(COMPARISONS) - full
    combinations = 3 * sum(len(state_dtypes(name)) for name in OPTIMIZERS)
    report = Report(as_json=options.json, cases=steps + combinations + 1)
    report.take(step_rows(BENCH, sizes, COMPARISONS, options.only))
    report.take(memory_rows(BENCH, memory_ids, options.only))
    report.close()


if __name__ == "__main__":
    main()
