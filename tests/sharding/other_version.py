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

    from clock_steps import trained
    from pipeline_steps import losses, semi_synchronous
    from ranks import Ranks
    from sharded_models import Table
    from sharded_training import Case, trains_as_unsharded
    from storage_steps import trained as trained_stored
    from test_clocks import BAGS, check_shards
    from torch.testing import assert_close

    bags = (
        Table("rows", 8, ("a", "b"), "mean", "row_wise"),
        Table("whole", 16, ("c",), "sum", "table_wise"),
    )
    sequences = (Table("sequences", 8, ("d",), "none", "row_wise"),)
    ranks = Ranks(2)
    try:
        for case in (Case(bags), Case(bags, "vbe"), Case(sequences)):
            ranks.run(trains_as_unsharded, case)
        for kind in ("plain", "vbe"):
            check_shards(ranks.run(trained, BAGS, kind, None, True))
        for dedup in (False, True):
            plain, pipelined = (ranks.run(losses, way, dedup) for way in (False, True))
            assert_close(plain, pipelined, rtol=1e-5, atol=1e-6)
        plain, pipelined = (ranks.run(semi_synchronous, way) for way in (False, True))
        assert_close([scores for scores, _ in plain], [scores for scores, _ in pipelined])
        alone = ranks.run(trained_stored, "memory", "", False, False)
        stored = ranks.run(trained_stored, "dict", "", True, False)
        assert_close([of.outputs for of in stored], [of.outputs for of in alone], rtol=0, atol=0)
    finally:
        ranks.stop()


if __name__ == "__main__":
    main(sys.argv[1])
