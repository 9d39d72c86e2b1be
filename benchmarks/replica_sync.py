"""Sync of a dynamic table over sharding groups (2D parallelism) against TorchRec's whole table.

A table of 1 M ids, D=64, row-wise Adagrad, on two sharding groups of two ranks (gloo, one thread
each). Before each sync every group trains a share of the ids. TorchRec's sync averages a static
table of as many rows.
"""

from __future__ import annotations

import importlib.util

from common.command import is_selected, parser, positive
from common.report import Report, compare

BENCH = "replica_sync"
PEER = "TorchRec's sync of a static table"
SHARES = (0.001, 0.01, 0.1, 0.5)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="ids of the table (default 1,000,000)")
    arguments.add_argument("--dim", type=positive, default=64, help="columns (default 64)")
    options = arguments.parse_args()
    for package in ("torchrec", "fbgemm_gpu"):
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"{package} is not installed: `make bench` installs the peers")
    from sharded.processes import measured
    from sharded.replicas import RANKS, Sizes, work

    rows = options.ids or (100_000 if options.quick else 1_000_000)
    sizes = Sizes(rows=rows, dim=options.dim, rounds=options.rounds)
    shares = [
        share for share in SHARES if is_selected(options.only, f"{100 * share:g} % of ids", PEER)
    ]
    report = Report(as_json=options.json, cases=len(shares))
    results = measured(work, RANKS, len(shares), sizes, shares)
    for share in shares:
        case = f"{100 * share:g} % of ids"
        report.start(case)
        result = next(results)
        report.add(
            compare(
                BENCH,
                case,
                result.timings["ours"],
                PEER,
                result.timings["peer"],
                sent_bytes=result.sent["ours"],
                peer_sent_bytes=result.sent["peer"],
                rows=sizes.rows,
                dim=sizes.dim,
            )
        )
    results.close()
    report.close()


if __name__ == "__main__":
    main()
