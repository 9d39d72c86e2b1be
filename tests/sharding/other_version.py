"""Trains with the TorchRec that is first on PYTHONPATH: ``python other_version.py directory``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

TESTS = Path(__file__).parent


def main(directory: str) -> None:
    sys.path[1:1] = [str(TESTS), str(TESTS.parent), str(TESTS.parent / "matrix")]
    import torchrec

    found = Path(torchrec.__file__ or "")
    if Path(directory).resolve() not in found.resolve().parents:
        raise SystemExit(f"torchrec is {found}, expected one in {directory}")

    from chosen_steps import trained_ways
    from clock_steps import trained
    from covering import failures
    from dynamicemb_program_steps import save_and_load
    from frozen_steps import frozen, quantized_by_torchrec
    from pipelines_space import SPACE
    from ranks import Ranks
    from replica_checkpoint_steps import saves_and_loads
    from replica_dense_steps import static_beside_dynamic
    from replica_steps import Case as Case2D
    from replica_steps import refused, syncs_as_expected
    from reshard_steps import moved_and_loaded
    from sharded_models import Table
    from sharded_training import Case, trains_as_unsharded
    from storage_steps import trained as trained_stored
    from table_rows_steps import streamed
    from test_chosen_tables import check_ways
    from test_clocks import BAGS, check_shards
    from test_frozen_models import check, pooled, unpooled
    from test_live_resharding import check as check_moves
    from test_live_resharding import kinds_of
    from test_replicas import OPTIONS, REFUSED, SHARDINGS
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
        piped = [
            "pipeline=sparse_dist pooling=mean beside=both_kinds sharding=row_wise",
            "pipeline=sparse_dist use_index_dedup=True",
            "pipeline=semi_sync beside=both_kinds optimizer=adam",
        ]
        cases = [SPACE.parsed(f"ranks=2 {of}") for of in piped]
        assert failures(SPACE, cases, lambda _: ranks) == []
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
        moving = kinds_of(
            [
                ("table_wise", "row_wise", "sum"),
                ("row_wise", "column_wise", "sum"),
                ("column_wise", "table_wise", "none"),
            ]
        )
        with TemporaryDirectory() as folder:
            path = f"{folder}/before"
            check_moves(ranks.run(moved_and_loaded, moving, "adam", path), moving)
            for of in ranks.run(save_and_load, f"{folder}/saved"):
                assert_close(of.loaded, of.trained, rtol=0, atol=0)
    finally:
        ranks.stop()
    ranks = Ranks(4, local_size=2)
    grid = tuple(replace(table, sharding="grid_shard") for table in bags)
    try:
        for kind in ("plain", "vbe", "late_vbe"):
            ranks.run(trains_as_unsharded, Case(grid, kind))
        case = Case2D(SHARDINGS, OPTIONS, rounds=("train", "one group", "remove", "train"))
        ranks.run(syncs_as_expected, case)
        for means, _, static in ranks.run(static_beside_dynamic):
            assert max(means) < 1e-6
            assert static[0] == static[1]
        for kind in ("strategy", "plan of one rank"):
            for error in ranks.run(refused, kind, ""):
                assert REFUSED[kind] in error
        with TemporaryDirectory() as folder:
            ranks.run(saves_and_loads, folder)
    finally:
        ranks.stop()


if __name__ == "__main__":
    main(sys.argv[1])
