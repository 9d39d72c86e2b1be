"""Tables of a running job that move to the shards of another plan, between two ranks.

A table of a million ids with Adam (gloo, one thread each) moves from one sharding type to another
and back: ``torch_dynemb.torchrec.reshard``. The peer saves a checkpoint, constructs a model with
the other plan, and loads it.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from common.command import is_selected, parser, positive
from common.report import Report, compare

BENCH = "live_resharding"
PEER = "save and load"
PAIRS = (
    ("table_wise", "row_wise"),
    ("row_wise", "table_wise"),
    ("row_wise", "column_wise"),
    ("table_wise", "column_wise"),
)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="of the table (default 1 M)")
    options = arguments.parse_args()
    if importlib.util.find_spec("torchrec") is None:
        raise SystemExit("torchrec is not installed: `make bench` installs the peers")
    from sharded.moves import RANKS, Case, work
    from sharded.processes import run_ranks

    ids = options.ids or (20_000 if options.quick else 1_000_000)
    wanted = [
        (f"{old} to {new}, D={dim}", Case(old, new, dim, ids))
        for old, new in PAIRS
        for dim in (16, 64)
        if is_selected(options.only, f"{old} to {new}, D={dim}", PEER)
    ]
    report = Report(as_json=options.json, cases=len(wanted))
    for name, case in wanted:
        report.start(name)
        with tempfile.TemporaryDirectory() as directory:
            path = str(Path(directory) / "checkpoint")
            first, *others = run_ranks(work, RANKS, path, case, options.rounds)
        report.add(
            compare(
                BENCH,
                name,
                first.moves,
                PEER,
                first.loads,
                save_ms=first.saves.median_ms,
                megabytes=case.table_bytes / 1e6,
                megabytes_sent=first.sent_bytes / 1e6,
                extra_megabytes=sum(of.extra_bytes for of in (first, *others)) / 1e6,
                ids=ids,
            )
        )
    report.close()


if __name__ == "__main__":
    main()
