"""State dicts of sharded dynamic tables: from any number of ranks and sharding to any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_optimizer_calls import accumulated
from ranks import Ranks
from state_steps import (
    Setting,
    interrupted_loads,
    load,
    load_damaged,
    load_other_entries,
    load_part,
    load_static,
    load_wrong,
    round_trip,
    save,
)
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.policy.policy import SCORES
from torch_dynemb.torchrec.state.entry_checks import check_entries
from torch_dynemb.torchrec.state.table_state import Layout, TableShape

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

SHARDINGS = ["row_wise", "table_wise", "column_wise"]
ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")
Content = dict[str, Any]


@pytest.fixture(scope="module")
def other_ranks(three_ranks: Ranks) -> Iterator[dict[int, Ranks]]:
    one = Ranks(1)
    yield {1: one, 3: three_ranks}
    one.stop()


def by_id(of_ranks: list[Content]) -> dict[str, dict[str, Tensor]]:
    """Whole tables from what the ranks have: ascending ids, and what belongs to them."""
    result: dict[str, dict[str, Tensor]] = {}
    for table in sorted({name for of_rank in of_ranks for name in of_rank}):
        shards = [shard for of_rank in of_ranks for shard in of_rank.get(table, [])]
        by_columns: dict[tuple[int, int], list[dict[str, Tensor]]] = {}
        for shard in shards:
            content = shard["content"]
            flat = {"ids": content["ids"], "rows": content["rows"], "scores": content["scores"]}
            flat |= {f"state {name}": value for name, value in content["state"].items()}
            by_columns.setdefault(shard["columns"], []).append(flat)
        wide = []
        for columns in sorted(by_columns):
            parts = by_columns[columns]
            joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            order = torch.argsort(joined["ids"])
            wide.append({name: value[order] for name, value in joined.items()})
        for part in wide[1:]:
            assert torch.equal(part["ids"], wide[0]["ids"])
            assert torch.equal(part["scores"], wide[0]["scores"])
        whole = dict(wide[0])
        elements = [n for n in whole if n == "rows" or "exp_avg" in n]
        for name in elements:
            whole[name] = torch.cat([part[name] for part in wide], 1)
        result[table] = whole
    return result


def assert_same(saved: list[Content], loaded: list[Content]) -> None:
    before, after = by_id(saved), by_id(loaded)
    assert set(before) == set(after)
    for table, entries in before.items():
        assert entries["ids"].numel() > 0
        for name, value in entries.items():
            assert torch.equal(value, after[table][name]), (table, name)
    steps = {shard["steps"] for of_rank in saved for shards in of_rank.values() for shard in shards}
    for of_rank in loaded:
        for shards in of_rank.values():
            assert {shard["steps"] for shard in shards} <= steps


# others, and other numbers of ranks: matrix/sharded_saving_space.py
@pytest.mark.parametrize(
    ("before", "after"), [("row_wise", "column_wise"), ("column_wise", "table_wise")]
)
def test_save_on_two_ranks_load_on_one_two_and_three(
    two_ranks: Ranks,
    other_ranks: dict[int, Ranks],
    tmp_path: Path,
    before: str,
    after: str,
) -> None:
    setting = Setting(before, policy="scores")
    saved = two_ranks.run(save, setting, str(tmp_path), 4)
    for ranks in (other_ranks[1], two_ranks, other_ranks[3]):
        loaded = ranks.run(load, replace(setting, sharding_type=after), str(tmp_path), range(0))
        assert_same(saved, loaded)


@pytest.mark.parametrize(
    ("sharding_type", "policy", "pooled"),
    [
        ("row_wise", "plain", True),
        ("row_wise", "admission", False),
        ("column_wise", "admission", True),
        ("table_wise", "plain", False),
    ],
)
def test_resumed_training_equals_uninterrupted_training(
    two_ranks: Ranks, tmp_path: Path, sharding_type: str, policy: str, pooled: bool
) -> None:
    setting = Setting(sharding_type, pooled=pooled, policy=policy)
    two_ranks.run(save, setting, str(tmp_path / "half"), 3)
    resumed = two_ranks.run(load, setting, str(tmp_path / "half"), range(3, 6))
    uninterrupted = two_ranks.run(save, setting, str(tmp_path / "whole"), 6)
    assert_same(uninterrupted, resumed)
    for one, other in zip(uninterrupted, resumed, strict=True):
        for table, shards in one.items():
            for x, y in zip(shards, other[table], strict=True):
                assert x["clock"] == y["clock"]
                if policy == "admission":
                    assert x["waiting"]["ids"].numel() > 0
                    assert torch.equal(x["waiting"]["ids"], y["waiting"]["ids"])
                    assert torch.equal(x["waiting"]["counts"], y["waiting"]["counts"])


def test_resharded_training_equals_uninterrupted_training(
    two_ranks: Ranks, other_ranks: dict[int, Ranks], tmp_path: Path
) -> None:
    setting = Setting("row_wise")
    two_ranks.run(save, setting, str(tmp_path / "half"), 3)
    more = replace(setting, sharding_type="column_wise")
    resumed = by_id(other_ranks[3].run(load, more, str(tmp_path / "half"), range(3, 6)))
    whole = by_id(two_ranks.run(save, setting, str(tmp_path / "whole"), 6))
    for table, entries in whole.items():
        assert torch.equal(entries["ids"], resumed[table]["ids"])
        torch.testing.assert_close(entries["rows"], resumed[table]["rows"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise"])
def test_state_of_8_bits_without_a_file(two_ranks: Ranks, sharding_type: str) -> None:
    setting = Setting(sharding_type, optimizer="8 bits")
    results = two_ranks.run(round_trip, setting)
    saved, loaded = ([result[side] for result in results] for side in (0, 1))
    for one, other in zip(saved, loaded, strict=True):
        for table, shards in one.items():
            for x, y in zip(shards, other[table], strict=True):
                for name in ("ids", "rows", "scores"):
                    assert torch.equal(x["content"][name], y["content"][name])
                for name, state in x["content"]["state"].items():
                    assert torch.equal(state, y["content"]["state"][name])


def test_micro_batches_on_one_process_are_one_batch(other_ranks: dict[int, Ranks]) -> None:
    (in_parts,), (at_once,) = (other_ranks[1].run(accumulated, split) for split in (True, False))
    assert in_parts.keys() == at_once.keys()
    for name, tensors in in_parts.items():
        for x, y in zip(tensors, at_once[name], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_names_are_those_of_virtual_tables(two_ranks: Ranks) -> None:
    for _, _, names in two_ranks.run(round_trip, Setting(policy="scores")):
        ads = [name.split(".", 2)[2] for name in names if ".ads." in name]
        assert ads == [
            "bucket",
            "layout",
            "metadata",
            "optimizer.exp_avg",
            "optimizer.exp_avg_sq",
            "optimizer.step",
            "weight",
            "weight_id",
        ]


@pytest.mark.parametrize("sharding_type", SHARDINGS)
def test_weights_of_a_static_collection(two_ranks: Ranks, sharding_type: str) -> None:
    results = two_ranks.run(load_static, Setting(sharding_type))
    weights = results[0][1]
    for _, _, missing in results:
        entries = ("weight_id", "bucket", "layout", *(f"optimizer.{n}" for n in ADAM_STATE))
        assert missing == [f"embedding_bags.{t}.{e}" for t in ("ads", "users") for e in entries]
    for table, entries in by_id([result[0] for result in results]).items():
        assert torch.equal(entries["ids"], torch.arange(7))
        assert torch.equal(entries["rows"], weights[table])
        assert not entries["state exp_avg"].any()


def test_state_of_another_optimizer_is_refused(two_ranks: Ranks) -> None:
    setting = Setting()
    for message, unchanged in two_ranks.run(
        load_wrong, setting, replace(setting, optimizer="rowwise")
    ):
        assert (
            "table 'ads': was saved with optimizer state ['optimizer.sum'], but Adam has "
            "['optimizer.exp_avg', 'optimizer.exp_avg_sq', 'optimizer.step']: give it the "
            "optimizer of the saved table"
        ) in message
        assert unchanged


def test_a_state_without_optimizer_state_says_so(two_ranks: Ranks) -> None:
    missing = [f"embedding_bags.{t}.optimizer.{n}" for t in ("ads", "users") for n in ADAM_STATE]
    results = two_ranks.run(load_part, "optimizer")
    for result in results:
        listed = ", ".join(f'"{name}"' for name in missing)
        assert f"Missing key(s) in state_dict: {listed}." in result["strict"]
        assert "load_state_dict(..., strict=False) of DistributedModelParallel" in result["strict"]
        assert result["unchanged"]
        assert (result["missing"], result["unexpected"]) == (missing, [])
    saved, loaded = (by_id([result[side] for result in results]) for side in ("saved", "loaded"))
    for table, entries in saved.items():
        for name in ("ids", "rows", "scores"):
            assert torch.equal(entries[name], loaded[table][name])
        assert entries["state exp_avg"].any()
        assert not any(loaded[table][f"state {name}"].any() for name in ADAM_STATE)
    # corrections of the bias begin anew with the state
    assert {of["steps"] for r in results for shards in r["loaded"].values() for of in shards} == {0}


def test_missing_scores_and_tables_are_listed(two_ranks: Ranks) -> None:
    results = two_ranks.run(load_part, "metadata")
    for result in results:
        names = [f"embedding_bags.{table}.metadata" for table in ("ads", "users")]
        assert all(f'"{name}"' in result["strict"] for name in names)
        assert result["unchanged"]
        assert result["missing"] == names
    saved, loaded = (by_id([result[side] for result in results]) for side in ("saved", "loaded"))
    for table, entries in saved.items():
        for name in ("ids", "rows", "state exp_avg"):
            assert torch.equal(entries[name], loaded[table][name])

    for result in two_ranks.run(load_part, ""):
        assert result["unchanged"]
        assert len(result["missing"]) == 2 * 8
        for table, shards in result["before"].items():  # also without strict
            for x, y in zip(shards, result["loaded"][table], strict=True):
                assert torch.equal(x["content"]["rows"], y["content"]["rows"])


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (
            "layout",
            "table 'ads': has ['bucket', 'metadata', 'optimizer.exp_avg', 'optimizer.exp_av",
        ),
        ("weight_id", "table 'ads': has layout, but lacks weight_id, the ids of the rows"),
    ],
)
def test_rows_without_their_ids_are_refused(two_ranks: Ranks, left_out: str, message: str) -> None:
    for result in two_ranks.run(load_part, left_out):
        assert result["unchanged"]
        assert f'"embedding_bags.ads.{left_out}"' in result["strict"]
        for raised in (result["strict"], result["not strict"]):
            assert message in raised


def test_entries_of_other_names_or_of_one_rank_are_refused(two_ranks: Ranks) -> None:
    for raised in two_ranks.run(load_other_entries):
        assert 'Unexpected key(s) in state_dict: "embedding_bags.ads.wieght"' in raised["unknown"]
        assert (
            "load_state_dict: table 'ads': entries differs between ranks: ['bucket', 'layout', "
            "'optimizer.exp_avg', 'optimizer.exp_avg_sq', 'optimizer.step', 'weight', 'weight_id'] "
            "on rank 0; ['bucket', 'layout', 'optimizer.exp_avg_sq'"
        ) in raised["ranks"]


REFUSED = {
    "scores": {
        "version": "layout has version [2]",
        "steps": "layout is damaged",
        "clock": "layout is damaged",
        "score": "layout is damaged",
        "scores": "layout is damaged",
        "columns": "layout is damaged",
        "time": "layout is damaged",
        "floats": "layout is torch.float32, expected int64",
        "no tensor": "weight is a list, expected a tensor",
        "meta": "layout is torch.int64, expected int64 with values",
        "negative step": "metadata has an id of step -7, expected 0 or more",
        "negative frequency": "metadata has an id of frequency -7, expected 0",
        "steps of rows": "'optimizer.step' is corrupted: a count is negative: -7",
        "old": "metadata has an id of step 0, expected",
        "rows left out": "ids, but weight_id has",
    },
    "admission": {
        "no count": "count has 0, expected counts from 1",
        "many counts": "count has 2147483648, expected counts from 1",
    },
}


@pytest.mark.parametrize("policy", list(REFUSED))
def test_damaged_states_are_refused_on_all_ranks(two_ranks: Ranks, policy: str) -> None:
    expected = REFUSED[policy]
    for of_rank in two_ranks.run(load_damaged, Setting(policy=policy), list(expected)):
        for name, message in expected.items():
            error, unchanged = of_rank[name]
            assert message in error, name
            assert unchanged, name


def test_numbers_of_scores_in_files_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first version wrote them."""
    written = torch.tensor([1, 7, 5, 5, 2, 0, 1, 2, 3, 4, 0, 8])
    names = ("step", "timestamp", "frequency", "custom", "expiry")
    layout = Layout(7, 5, names, (0, 8))
    assert torch.equal(layout.tensor(), written)
    assert Layout.of("t", written) == layout
    monkeypatch.setattr("torch_dynemb.policy.policy.SCORES", ("custom", "invented", "step"))
    assert Layout.of("t", written) == layout
    some = Layout(7, 5, ("step", "frequency", "expiry"), (0,))
    assert some.tensor().tolist() == [1, 7, 5, 3, 1, 0, 2, 4, 0]
    decays = some._replace(admission_half_life=-9)
    assert decays.tensor().tolist() == [1, 7, 5, 3, 1, 0, 2, 4, 0, 19]
    assert Layout.of("t", decays.tensor()) == decays
    timed = some._replace(now=1000)
    assert timed.tensor().tolist() == [1, 7, 5, 3, 1, 0, 2, 4, 0, 0, 1000]
    assert Layout.of("t", timed.tensor()) == timed


def test_counts_of_another_half_life_are_refused() -> None:
    shape = TableShape("t", 4, torch.float32, td.SGD(lr=0.1), (), True, [])
    entries = {"weight": torch.ones(1, 4), "weight_id": torch.ones(1, 1).long()}
    counts = {name: torch.ones(1, 1).long() for name in ("count_id", "count")}
    daily = Layout(0, 0, (), (0,), admission_half_life=86_400)
    assert check_entries(shape, entries, daily) == []
    (message,) = check_entries(shape, {**entries, **counts}, daily)
    assert message.startswith(
        "table 't': layout has counts of admission with a half-life of 86400 seconds, but the "
        "table's have no half-life: load a checkpoint of torch_dynemb.checkpoint.save"
    )
    same = shape._replace(admission_half_life=86_400)
    assert check_entries(same, {**entries, **counts}, daily) == []


def test_every_score_has_a_number_in_files() -> None:
    layout = Layout(0, 0, (*SCORES, "expiry"), (0,))
    assert Layout.of("t", layout.tensor()) == layout


@pytest.mark.parametrize("policy", ["admission", "scores"])
def test_an_interrupted_load_replaces_all_tables_or_none(
    other_ranks: dict[int, Ranks], policy: str
) -> None:
    (found,) = other_ranks[1].run(interrupted_loads, Setting(policy=policy))
    assert set(found) == {"before", "after"}
