"""CPU training step of dynamic tables in TorchRec against TorchRec's static ones.

An EmbeddingBagCollection of 26 tables of 1 M ids, D=64, sharded by DistributedModelParallel over 2
ranks (gloo, one thread each), batch 4096 a rank, 8192 together. A step is
forward, backward and fused update.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from common.command import is_selected, parser, positive
from common.report import Report, Row, compare

BENCH = "torchrec_step"
TARGET = 1.1
PEER = "TorchRec's fused static tables"


def row(sizes: Any, case: str, kind: str, share: float, bag: int, result: Any) -> Row:
    ours, peer = result.sent["ours"], result.sent["peer"]
    return compare(
        BENCH,
        f"{case}, {kind}",
        result.timings["ours"],
        PEER,
        result.timings["peer"],
        target=TARGET,
        ids_sent=ours.ids,
        peer_ids_sent=peer.ids,
        id_bytes=ours.id_bytes,
        peer_id_bytes=peer.id_bytes,
        row_bytes=ours.row_bytes,
        peer_row_bytes=peer.row_bytes,
        tables=sizes.tables,
        rows=sizes.rows,
        dim=sizes.dim,
        batch_of_a_rank=sizes.batch,
        bag=bag,
        new_share=share,
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tables", type=positive, default=26, help="tables (default 26)")
    arguments.add_argument("--rows", type=positive, help="ids of a table (default 1,000,000)")
    arguments.add_argument("--dim", type=positive, default=64, help="columns (default 64)")
    arguments.add_argument(
        "--batch", type=positive, default=4096, help="bags of a table on a rank (default 4096)"
    )
    arguments.add_argument(
        "--bags", type=positive, nargs="+", default=[1, 10], help="ids a bag (default 1 10)"
    )
    arguments.add_argument(
        "--optimizers",
        nargs="+",
        choices=["RowWiseAdagrad", "SGD"],
        default=["RowWiseAdagrad", "SGD"],
        help="of the tables (default both)",
    )
    options = arguments.parse_args()
    for package in ("torchrec", "fbgemm_gpu"):
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"{package} is not installed: `make bench` installs the peers")
    from sharded.collections import SHARDINGS, Sizes
    from sharded.processes import measured
    from sharded.ranks import DYNAMIC, WORLD_SIZE, case_name, work

    sizes = Sizes(
        tables=options.tables,
        rows=options.rows or (100_000 if options.quick else 1_000_000),
        dim=options.dim,
        batch=options.batch,
        bags=tuple(options.bags),
        new_share=0.01,
        rounds=options.rounds,
        calls=1 if options.quick else 2,
    )
    wanted = [
        (sharding, optimizer, kind, bag, share)
        for sharding in SHARDINGS
        for optimizer in options.optimizers
        for kind in DYNAMIC
        for bag in sizes.bags
        for share in (0.0, sizes.new_share)
        if is_selected(options.only, f"{case_name(sharding, optimizer, bag, share)}, {kind}", PEER)
    ]
    report = Report(as_json=options.json, cases=len(wanted))
    results = measured(work, WORLD_SIZE, len(wanted), sizes, wanted)
    for sharding, optimizer, kind, bag, share in wanted:
        case = case_name(sharding, optimizer, bag, share)
        report.start(f"{case}, {kind}")
        report.add(row(sizes, case, kind, share, bag, next(results)))
    results.close()
    report.close()


if __name__ == "__main__":
    main()
