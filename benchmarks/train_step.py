"""CPU training step of a dynamic table against static ones.

One table of 1 M rows, batch 4096, 20 ids a bag, sum pooling, 2 threads: forward, backward and
update. Ours also hashes: its ids are 64-bit numbers, the peers' ids are row numbers.
"""

from __future__ import annotations

import torch
from common.command import parser
from common.report import Report
from training.comparisons import ADAM_COMPARISON, HAND_COMPARISONS, STATIC_COMPARISONS
from training.steps import DRAWS, add_size_arguments, sizes_of, step_rows

BENCH = "train_step"
OPTIMIZERS = ("RowWiseAdagrad", "Adagrad", "SGD", "Adam")
COMPARISONS = sorted(  # by optimizer: its table is made once
    [*STATIC_COMPARISONS, *HAND_COMPARISONS, ADAM_COMPARISON],
    key=lambda comparison: OPTIMIZERS.index(comparison.ours.optimizer),
)


def main() -> None:
    arguments = parser(__doc__)
    add_size_arguments(arguments)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    sizes = sizes_of(options, calls=8)
    cases = len(DRAWS) * len(sizes.dims) * len(COMPARISONS)
    report = Report(as_json=options.json, cases=cases)
    report.take(step_rows(BENCH, sizes, COMPARISONS, options.only))
    report.close()


if __name__ == "__main__":
    main()
