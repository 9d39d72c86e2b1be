"""Trains with the TorchRec that is first on PYTHONPATH: ``python other_version.py directory``."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent


def main(directory: str) -> None:
    sys.path[1:1] = [str(TESTS), str(TESTS.parent)]
    import torchrec

    found = Path(torchrec.__file__ or "")
    if Path(directory).resolve() not in found.resolve().parents:
        raise SystemExit(f"torchrec is {found}, expected one in {directory}")

    from ranks import Ranks
    from sharded_models import Table
    from sharded_training import Case, trains_as_unsharded

    bags = (
        Table("rows", 8, ("a", "b"), "mean", "row_wise"),
        Table("whole", 16, ("c",), "sum", "table_wise"),
    )
    sequences = (Table("sequences", 8, ("d",), "none", "row_wise"),)
    ranks = Ranks(2)
    try:
        for case in (Case(bags), Case(bags, "vbe"), Case(sequences)):
            ranks.run(trains_as_unsharded, case)
    finally:
        ranks.stop()


if __name__ == "__main__":
    main(sys.argv[1])
