"""Tables of a running model move to other shards: as a save and a load, without files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from checkpoint_models import POLICIES, Kind
from ranks import Ranks
from reshard_steps import (
    STAGES,
    Moved,
    beside_static_tables,
    failed_moves,
    in_pipeline,
    moved_and_loaded,
    rates_of_schedulers,
    refused,
)
from sharded_models import BAG_SHARDINGS, SEQUENCE_SHARDINGS

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


def kinds_of(pairs: list[tuple[str, str, str]], first: int = 0) -> tuple[Kind, ...]:
    """A table for each change of shards; they take turns in policies."""
    policies = list(POLICIES)
    return tuple(
        Kind(f"{pooling}_{a}_{b}", (a, b), policies[(first + n) % len(policies)], pooling)
        for n, (a, b, pooling) in enumerate(pairs)
    )


ALL = [(a, b, "sum") for a, b in itertools.permutations(BAG_SHARDINGS, 2)]
ALL += [(a, b, "none") for a, b in itertools.permutations(SEQUENCE_SHARDINGS, 2)]
# each type once as the old one, and once as the new one
SOME = [
    ("table_wise", "grid_shard", "sum"),
    ("column_wise", "row_wise", "sum"),
    ("row_wise", "table_column_wise", "sum"),
    ("table_column_wise", "table_row_wise", "sum"),
    ("grid_shard", "column_wise", "sum"),
    ("table_row_wise", "table_wise", "sum"),
    ("row_wise", "column_wise", "none"),
    ("table_wise", "row_wise", "none"),
    ("row_wise", "row_wise", "sum"),  # stays
]


def check(found: list[Moved], kinds: tuple[Kind, ...]) -> None:
    """The same ids, rows, state, scores, counts and clocks, at once and after more training."""
    moving = {kind.name for kind in kinds if kind.shardings[0] != kind.shardings[1]}
    for of in found:
        assert of.unequal == [], "\n".join(of.unequal)
        assert of.entries == []
        assert of.plan == {kind.name: kind.shardings[1] for kind in kinds}
        assert {name.rpartition(".")[2] for name in of.tables} == moving
        for name, table in of.tables.items():
            assert (table.ids, table.evicted) == of.loaded[name], name
            assert table.ids > 5, name
            assert table.bytes > 0, name
    assert sum(ids for of in found for ids in of.first) > 10 * len(kinds)


@pytest.mark.long
def test_tables_move_as_a_save_and_a_load(four_ranks: Ranks, tmp_path: Path) -> None:
    kinds = kinds_of(SOME)
    check(four_ranks.run(moved_and_loaded, kinds, "adam", str(tmp_path / "saved")), kinds)


@pytest.mark.long
@pytest.mark.parametrize("first", range(len(POLICIES)))
@pytest.mark.parametrize("optimizer", ["adam", "rowwise", "adam of 16 bits", "adagrad"])
def test_all_pairs_of_sharding_types(
    four_ranks: Ranks, tmp_path: Path, optimizer: str, first: int
) -> None:
    kinds = kinds_of(ALL, first)
    found = four_ranks.run(moved_and_loaded, kinds, optimizer, str(tmp_path / "saved"))
    check(found, kinds)
    assert sum(of.evicted for of in found) > 0


@pytest.mark.long
def test_an_error_of_a_rank_leaves_all_as_they_were(two_ranks: Ranks, tmp_path: Path) -> None:
    kinds = kinds_of(
        [
            ("table_wise", "row_wise", "sum"),
            ("column_wise", "row_wise", "sum"),
            ("row_wise", "table_wise", "sum"),
            ("row_wise", "column_wise", "none"),
        ]
    )
    for found in two_ranks.run(failed_moves, kinds, str(tmp_path / "saved")):
        for stage in STAGES:
            raised, unchanged = found[stage]
            assert raised.startswith("MemoryError: no memory for "), (stage, raised)
            assert unchanged, stage
        assert found["training goes on"] == ("[]", True)
        assert found["the next move"] == ("True", True)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["torch", "torchrec"])
def test_schedulers_of_before_reach_the_new_shards(two_ranks: Ranks, kind: str) -> None:
    """Also on a rank that had no table."""
    found = two_ranks.run(rates_of_schedulers, kind)
    # TorchRec's warmup sets a rate in step(), for the iteration that ends
    rates = [0.1, 0.1, 0.05, 0.025] if kind == "torchrec" else [0.1, 0.05, 0.025, 0.0125]
    for rank, seen in enumerate(found):
        for step, (of_tables, shown) in enumerate(seen):
            assert list(shown) == [pytest.approx(rates[step])], (rank, step)
            if step >= 2 or rank == 0:
                assert list(of_tables) == [pytest.approx(rates[step])], (rank, step)


@pytest.mark.long
def test_static_tables_and_handles_stay(two_ranks: Ranks) -> None:
    """By DistributedModelParallel.reshard."""
    for rank, found in enumerate(two_ranks.run(beside_static_tables)):
        assert found.pop("types") == {
            "rows": "column_wise",
            "whole": "row_wise",
            "fixed": "row_wise",
            "copied": "data_parallel",
        }
        assert found.pop("freed") == [True] * (1 + (rank == 1))
        assert "the tables moved to other shards" in found.pop("refused")
        assert found == {
            "volume": 1.5,
            "keys": True,
            "fixed": True,
            "copied": True,
            "params": [f"bags.embedding_bags.{name}.weight" for name in ("fixed", "rows", "whole")],
            "losses": [True] * 3,
            "static": True,
        }


REFUSED = {
    "model": ("TypeError", "model is Linear(in_features=1"),
    "plan": ("TypeError", "plan is 5"),
    "module plan": ("TypeError", "the plan of 'bags' is 5"),
    "module": ("ValueError", "the plan has module 'other'"),
    "table": ("ValueError", "the plan has tables ['others']"),
    "by rank": ("ValueError", "plan of 'bags' differs between ranks"),
    "module by rank": ("ValueError", "modules differs between ranks"),
    "type": ("ValueError", "has sharding_type 'data_parallel', expected one of ['table_wise'"),
    "kernel": ("ValueError", "has compute_kernel 'customized_kernel', but the plan has 'fused'"),
    "columns of ranks": ("ValueError", "has ranks [0, 7], but its sharding_spec has [0, 1]"),
    "static": ("NotImplementedError", "table 'fixed' is static"),
    "storage": ("NotImplementedError", "table 'whole' has storage ExternalStore"),
    "options": ("ValueError", "the plan has other TableOptions for table 'rows'"),
    "rank": ("ValueError", "table 'rows' has shards on ranks [7], expected ranks 0 to 1"),
    "columns": ("ValueError", "table 'rows' has column shards that begin at [0] and end at 4"),
    "pending": ("RuntimeError", "reshard: tables ['rows'] have gradients pending"),
    "save": ("InUseError", "has not ended yet"),
    "log": ("RuntimeError", "a delta log records changes of tables ['rows']"),
}


@pytest.mark.long
def test_wrong_calls_change_nothing(two_ranks: Ranks, tmp_path: Path) -> None:
    for found in two_ranks.run(refused, str(tmp_path)):
        for name, (kind, text) in REFUSED.items():
            raised, unchanged = found.pop(name)
            assert raised.startswith(f"{kind}: "), (name, raised)
            assert text in raised, (name, raised)
            assert unchanged, name
        assert found == {"nothing": ("nothing", True), "the same": ("nothing", True)}


@pytest.mark.long
def test_pipelines_detach_before(two_ranks: Ranks) -> None:
    found: list[Any] = two_ranks.run(in_pipeline)
    for raised, moved, stays in found:
        assert raised[0].startswith("RuntimeError: reshard: a pipeline runs 'pooled'")
        assert raised[1] == "nothing"
        assert moved == pytest.approx(stays, rel=1e-5)
