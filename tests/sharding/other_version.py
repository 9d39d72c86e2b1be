"""Trains with the TorchRec that is first on PYTHONPATH: ``python other_version.py directory``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

TESTS = Path(__file__).parent


def main(directory: str) -> None:
    sys.path[1:1] = [str(TESTS), str(TESTS.parent)]
    import torchrec

    found = Path(torchrec.__file__ or "")
    if Path(directory).resolve() not in found.resolve().parents:
        raise SystemExit(f"torchrec is {found}, expected one in {directory}")

    from chosen_steps import trained_ways
    from clock_steps import trained
    from dynamicemb_program_steps import save_and_load
    from frozen_steps import frozen, quantized_by_torchrec
    from pipeline_steps import losses, semi_synchronous
    from ranks import Ranks
    from sharded_models import Table
    from sharded_training import Case, trains_as_unsharded
    from storage_steps import trained as trained_stored
    from table_rows_steps import streamed
    from test_chosen_tables import check_ways
    from test_clocks import BAGS, check_shards
    from test_frozen_models import check, pooled, unpooled
    from test_table_rows import TWO_RANKS
    from test_table_rows import check as check_rows
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
        dynamic = [table for table in pooled("row_wise") if table.dynamic]
        for kind in ("plain", "vbe"):
            check(ranks.run(frozen, dynamic, kind, "all"), exact=False)
        check(ranks.run(frozen, pooled("row_wise"), "plain", "all"), exact=False)
        dynamic += [table for table in unpooled("row_wise") if table.dynamic]
        dynamic = [replace(table, name=f"{table.pooling}_{table.name}") for table in dynamic]
        assert ranks.run(quantized_by_torchrec, dynamic) == [True, True]
        check_ways(ranks.run(trained_ways))
        check_rows(ranks.run(streamed, TWO_RANKS, "rowwise"), {of.name: of.dim for of in TWO_RANKS})
        with TemporaryDirectory() as folder:
            for of in ranks.run(save_and_load, f"{folder}/saved"):
                assert_close(of.loaded, of.trained, rtol=0, atol=0)
    finally:
        ranks.stop()
    ranks = Ranks(4, 2)
    grid = tuple(replace(table, sharding="grid_shard") for table in bags)
    try:
        for kind in ("plain", "vbe", "late_vbe"):
            ranks.run(trains_as_unsharded, Case(grid, kind))
    finally:
        ranks.stop()


if __name__ == "__main__":
    main(sys.argv[1])
