"""Loading a TorchRec model with a dynamic table by torch.distributed.checkpoint.

A table of 235 MB of rows, optimizer state and ids on one rank or two (gloo, one thread each) is
saved once, and loaded into a new model in every round: ``dcp.load`` with LoadPlanner, which fills a
state dict, and ``model.load_state_dict``.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from common.command import is_selected, parser, positive
from common.report import Report, compare, quantity

BENCH = "dcp_load"
PEER = "its dcp.load alone"
MEMORY_TARGET = 1.2


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--megabytes", type=positive, help="of a table (default 235)")
    options = arguments.parse_args()
    if importlib.util.find_spec("torchrec") is None:
        raise SystemExit("torchrec is not installed: `make bench` installs the peers")
    from sharded.loads import STATES, Load, work
    from sharded.processes import run_ranks

    wanted = []
    table_bytes = 10**6 * (options.megabytes or (20 if options.quick else 235))
    for ranks in (1, 2):
        for dim in (16, 64):
            for optimizer in STATES:
                ids = table_bytes // Load(ranks, dim, optimizer, 1).table_bytes
                case = f"{optimizer} D={dim}, {ranks} rank{'s' * (ranks > 1)}"
                if is_selected(options.only, case, PEER):
                    wanted.append((case, Load(ranks, dim, optimizer, ids)))
    report = Report(as_json=options.json, cases=2 * len(wanted))
    for case, load in wanted:
        report.start(case)
        with tempfile.TemporaryDirectory() as directory:
            path = str(Path(directory) / "checkpoint")
            run_ranks(
                work, load.ranks, path, load, 0
            )  # by processes of its own: the loads begin without its memory
            ranks = run_ranks(work, load.ranks, path, load, options.rounds)
        first = ranks[0]
        rates = {
            "megabytes_a_second": load.table_bytes / 1e3 / first.whole.median_ms,
            "megabytes": load.table_bytes / 1e6,
            "ids": load.ids,
            "ranks": load.ranks,
            "dim": load.dim,
        }
        report.add(compare(BENCH, case, first.whole, PEER, first.reading, **rates))
        extra = sum(rank.extra_bytes for rank in ranks) / load.table_bytes
        of_all = f"{case}: extra memory"
        report.add(quantity(BENCH, of_all, extra, "of the table", target=MEMORY_TARGET))
    report.close()


if __name__ == "__main__":
    main()
