"""DynamicDMPCollection: two sharding groups of two ranks, equal after each sync."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from replica_checkpoint_steps import logs, saves_and_loads
from replica_dense_steps import recis_beside, static_beside_dynamic, synced_bytes
from replica_steps import Case, fails_on_one_rank, refused, refused_calls, syncs_as_expected
from sharded_models import Table

import torch_dynemb as td
from torch_dynemb.table.waiting_counts import CountUpdate
from torch_dynemb.torchrec import TableOptions
from torch_dynemb.torchrec.replicas.table_merge import TableMerge

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

SHARDINGS = (
    Table("rows", 8, ("a",), "mean"),
    Table("whole", 4, ("b",), "sum", "table_wise"),
    Table("columns", 8, ("c",), "sum", "column_wise"),
    Table("sequence", 8, ("d",), "none", "row_wise"),
)
EVICTING = TableOptions(initializer=td.Normal(), policy=td.Policy(score="frequency", capacity=14))
ADMITTING = TableOptions(
    initializer=td.Normal(),
    policy=td.Policy(score="frequency", admission=td.AdmitFrequent(3)),
)
OPTIONS = {"rows": EVICTING, "whole": ADMITTING, "columns": EVICTING, "sequence": ADMITTING}


@pytest.mark.long
def test_groups_are_equal_after_each_sync(four_ranks: Ranks) -> None:
    of_ranks = four_ranks.run(syncs_as_expected, Case(SHARDINGS, OPTIONS))
    assert of_ranks[0] == of_ranks[1]  # ranks of a replica group
    assert of_ranks[2] == of_ranks[3]
    assert all(len(sizes) == 6 and min(sizes) > 0 for sizes in of_ranks)


REFUSED = {
    "size": "ValueError: DynamicDMPCollection: sharding_group_size is 3, which does not divide",
    "size of one rank": "sharding_group_size differs between ranks: 2 on ranks 0, 2, 3; 4 on rank",
    "world": "ValueError: DynamicDMPCollection: world_size is 8, but global_pg has 4 ranks",
    "plan": "plan has table 'rows' of 'bags' on ranks [1], expected ranks below sharding_group",
    "plan of one rank": "table 'bags.rows': plan differs between ranks",
    "options of one rank": "table 'rows': options.policy.capacity differs between ranks",
    "strategy": "NotImplementedError: EmbeddingBagCollection: sharding_strategy is FULLY_SHARDED",
    "8-bit": "NotImplementedError: DynamicDMPCollection: tables ['rows'] have 8-bit state",
    "sketch": "has admission AdmitFrequentSketch(threshold=2, memory=512, halve_every=None), the",
    "disk": "NotImplementedError: DynamicDMPCollection: tables ['rows'] have storage SSDStore(",
    "dict": "DynamicDMPCollection: tables ['rows'] have storage ExternalStore(",
    "modules": "NotImplementedError: DynamicDMPCollection: submodule_configs is given, but over",
    "group": "TypeError: DynamicDMPCollection: global_pg is None, expected a ProcessGroup",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refuses_on_all_ranks(four_ranks: Ranks, kind: str, tmp_path: Path) -> None:
    for error in four_ranks.run(refused, kind, str(tmp_path)):
        assert REFUSED[kind] in error


def test_refused_calls_change_nothing(four_ranks: Ranks) -> None:
    for errors in four_ranks.run(refused_calls):
        optimizer, state_dict, load, moved, pending, full = errors
        assert "sync: include_optimizer_state is False, but tables" in optimizer
        assert "state_dict: tables ['rows', 'full'] are dynamic, and each sharding group" in (
            state_dict
        )
        assert "load_state_dict: tables ['rows', 'full'] are dynamic" in load
        assert "reshard: tables ['rows', 'full'] are dynamic, and each sharding group" in moved
        assert "sync: tables ['rows'] have pending gradients: call step()" in pending
        assert "sync: table 'full' has a capacity of 16 and on_full='error', but the" in full


@pytest.mark.parametrize(
    ("kind", "method"), [(TableMerge, "records"), (TableMerge, "merged"), (CountUpdate, "apply")]
)
def test_a_failing_rank_changes_nothing(four_ranks: Ranks, kind: type, method: str) -> None:
    for error, ids in four_ranks.run(fails_on_one_rank, kind, method):
        assert error == "no memory on rank 2"
        assert ids > 0


def test_static_tables_are_synced_by_torchrec(four_ranks: Ranks) -> None:
    for means, dense, static in four_ranks.run(static_beside_dynamic):
        assert max(means) < 1e-6
        assert all(of == dense[0] for of in dense)
        assert static[0] == static[1]


@pytest.mark.long
def test_bytes_are_those_of_touched_rows(four_ranks: Ranks) -> None:
    ids = 2000
    for of_rank in four_ranks.run(synced_bytes, ids, (0, 20, 200)):
        nothing, few, more = (ours for ours, _ in of_rank)
        assert nothing < 200
        assert 8 * (few - nothing) < more - nothing < 12 * (few - nothing)
        # rows of 16 columns and a value of state, half of them on each rank of a group
        assert [theirs for _, theirs in of_rank] == 3 * [4 * 17 * ids // 2]
        assert few < 0.02 * of_rank[1][1]
        assert more < 0.15 * of_rank[2][1]


@pytest.mark.long
def test_first_group_saves_and_all_load(four_ranks: Ranks, tmp_path: Path) -> None:
    for result in four_ranks.run(saves_and_loads, str(tmp_path)):
        assert "has the same ids on ranks" in result["save"]
        assert "give process_group=" in result["save"]
        assert "were loaded since the last sync, with another content" in result["load"]
        assert result["rows"] > 0


@pytest.mark.long
def test_delta_log_of_the_first_group(four_ranks: Ranks, tmp_path: Path) -> None:
    for result in four_ranks.run(logs, str(tmp_path)):
        assert "give process_group=" in result["attach"]
        assert result["rows"][-1] > 0


@pytest.mark.long
def test_recis_modules_share_rows_over_all_ranks(four_ranks: Ranks) -> None:
    of_ranks = four_ranks.run(recis_beside)
    assert sorted(id for _, ids in of_ranks for id in ids) == list(range(21))
    assert all("HashTable: the table is inside DistributedData" in error for error, _ in of_ranks)


OPTIMIZERS: dict[str, td.OptimizerConfig] = {
    "sgd": td.SGD(lr=0.1),
    "momentum": td.MomentumSGD(lr=0.1, momentum=0.9),
    "adagrad": td.Adagrad(lr=0.1, initial_accumulator_value=0.1),
    "rowwise": td.RowWiseAdagrad(lr=0.1),
    "rowwise, last step by row": td.RowWiseRMSprop(lr=0.1, ar_alpha=0.5),
    "ftrl": td.Ftrl(lr=0.1),
    "adam, bfloat16": td.Adam(lr=0.1, state_dtype=torch.bfloat16),
    "adam by row": td.PartialRowWiseAdam(lr=0.1),
    "amsgrad": td.AMSGrad(lr=0.1),
    "steps by row": td.AdamWTF(lr=0.1),
    "last step by row": td.SmartDecayAdam(lr=0.1),
}


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(four_ranks: Ranks, optimizer: str) -> None:
    dtype = "BF16" if "bfloat16" in optimizer else "FP32"
    tables = tuple(replace(of, data_type=dtype) for of in SHARDINGS[:3])
    case = Case(tables, OPTIONS, OPTIMIZERS[optimizer], ("train", "remove", "train"))
    assert len(four_ranks.run(syncs_as_expected, case)[0]) == 3


POLICIES = {
    "none": td.Policy(),
    "step, evicted": td.Policy(capacity=12),
    "timestamp": td.Policy(score="timestamp", capacity=12),
    "frequency": td.Policy(score=("frequency", "timestamp"), capacity=12),
    "decayed": td.Policy(score="decayed", half_life_steps=3),
    "ttl": td.Policy(ttl=1000),
    "no row for new ids": td.Policy(score="step", capacity=12, on_full="default"),
    "custom": td.Policy(score="custom"),
    "largest": td.Policy(score=td.Custom(combine="max")),
    "sum": td.Policy(score=td.Custom(combine="sum"), capacity=12),
    "decayed sum": td.Policy(score=td.Custom(combine="decayed_sum", half_life_steps=3)),
    "decayed admission": td.Policy(admission=td.AdmitFrequent(2, half_life_steps=2)),
    "admission": td.Policy(admission=td.AdmitFrequent(2), score=("frequency", "step")),
}


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "column_wise"])
def test_policies(four_ranks: Ranks, policy: str, sharding: str) -> None:
    tables = (
        Table("pooled", 8, ("a", "b"), "sum", sharding),
        Table("sequence", 8, ("c",), "none", sharding),
    )
    options = TableOptions(initializer=td.Normal(), policy=POLICIES[policy])
    case = Case(tables, dict.fromkeys(("pooled", "sequence"), options), td.SGD(lr=0.1))
    assert len(four_ranks.run(syncs_as_expected, case)[0]) == len(case.rounds)


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["table_column_wise", "table_row_wise", "grid_shard"])
def test_other_shardings(four_ranks: Ranks, sharding: str) -> None:
    tables = (Table("pooled", 8, ("a",), "sum", sharding),)
    assert len(four_ranks.run(syncs_as_expected, Case(tables, {"pooled": EVICTING}))[0]) == 6
