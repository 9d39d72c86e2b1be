"""Checkpoints of sharded models: from any sharding and number of ranks into any other."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from checkpoint_content import same as same_values
from checkpoint_content import saved_content
from checkpoint_models import (
    POLICIES,
    START,
    Kind,
    Unsharded,
    Whole,
    bags_of,
    equal_shards,
    every_change,
    shards_of_unsharded,
    train_unsharded,
    whole_tables,
)
from checkpoint_steps import (
    Found,
    How,
    load_model,
    names_of,
    pending_gradients,
    refused_load,
    same,
    save_increments,
    save_model,
    steps_that_nobody_ends,
)
from ranks import Ranks
from sharded_models import BAG_SHARDINGS

import torch_dynemb as td
from torch_dynemb.checkpoint import LoadReport
from torch_dynemb.distributed.owners import part_of
from torch_dynemb.ops.columns import Table
from torch_dynemb.rows.sketches import combined_sketch

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

TWO_RANKS = ("table_wise", "row_wise", "column_wise", "table_column_wise")
UNPOOLED = ("table_wise", "row_wise", "column_wise")
KINDS = every_change(TWO_RANKS, UNPOOLED)
SAVED, MORE = range(3), range(3, 5)


def tables_of(found: list[Found], after: bool = False) -> dict[str, Whole]:
    return whole_tables([of.after if after else of.shards for of in found])


def assert_equal(one: Whole, other: Whole, name: str) -> None:
    """The same ids, and what belongs to them; a mean over columns may be rounded."""
    assert torch.equal(one.ids, other.ids), name
    assert one.counts == other.counts, name
    assert one.steps == other.steps, name
    assert one.values.keys() == other.values.keys(), name
    for key, values in one.values.items():
        if key == "state sum":
            torch.testing.assert_close(values, other.values[key])
        else:
            assert torch.equal(values, other.values[key]), (name, key)


def assert_loaded(
    saved: dict[str, Whole], loaded: dict[str, Whole], report: LoadReport, parts: dict[str, int]
) -> None:
    """Everything, but for ids without room: those with the least scores of their part."""
    assert report.missing == report.unexpected == ()
    told_of = {name.rpartition(".")[2]: of for name, of in report.tables.items()}
    assert saved.keys() == loaded.keys() == told_of.keys()
    for name, before in saved.items():
        after, told = loaded[name], told_of[name]
        assert told.ids == after.ids.numel(), name
        assert told.evicted == before.ids.numel() - told.ids, name
        kept = torch.isin(before.ids, after.ids)
        if told.evicted:
            scores, part = before.values["scores"][:, -1], part_of(before.ids, parts[name])
            for p in range(parts[name]):
                here, gone = scores[(part == p) & kept], scores[(part == p) & ~kept]
                assert gone.numel() == 0 or here.min() >= gone.max(), name
        values = {key: of[kept] for key, of in before.values.items()}
        assert_equal(before._replace(ids=before.ids[kept], values=values), after, name)


def parts_of_ids(kinds: tuple[Kind, ...], side: int, ranks: int = 2) -> dict[str, int]:
    """How many parts share the ids of each table; nodes have two ranks."""
    parts = {"row_wise": ranks, "table_row_wise": 2, "grid_shard": 2}
    return {kind.name: parts.get(kind.shardings[side], 1) for kind in kinds}


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adam", "rowwise"])
def test_every_change_of_the_sharding(two_ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    """Two ranks, one process without TorchRec, and back."""
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    saved = two_ranks.run(save_model, KINDS, 0, optimizer, first, SAVED)
    tables = tables_of(saved)
    assert all(of.ids.numel() > 5 for of in tables.values())
    assert any(of.counts for of in tables.values())

    loaded = two_ranks.run(load_model, KINDS, 1, optimizer, first, How(more=MORE, back=second))
    again = tables_of(loaded)
    for of in loaded:
        assert of.report is not None
        assert of.report.state == {"step": 3}
        assert of.dense.keys() == saved[0].dense.keys()
        assert all(torch.equal(of.dense[name], v) for name, v in saved[0].dense.items())
        assert_loaded(tables, again, of.report, parts_of_ids(KINDS, 1))

    alone = Unsharded(KINDS, 0, optimizer)
    report = td.checkpoint.load(second, alone)
    alone_tables = whole_tables([shards_of_unsharded(alone)])
    assert_loaded(again, alone_tables, report, dict.fromkeys(again, 1))
    assert torch.equal(alone.over.weight, saved[0].dense["over.weight"])

    td.checkpoint.save(third, alone, state={"step": 3})
    back = two_ranks.run(load_model, KINDS, 0, optimizer, third, How(before=range(7, 9)))
    assert back[0].report is not None
    assert_loaded(alone_tables, tables_of(back), back[0].report, parts_of_ids(KINDS, 0))

    train_unsharded(alone, names_of(KINDS), MORE)
    expected, trained = whole_tables([shards_of_unsharded(alone)]), tables_of(loaded, after=True)
    for kind in KINDS:
        # the parts of a table share its room, and a sketch, in other ways
        if kind.policy in ("evicting", "sketched"):
            continue
        one, other = expected[kind.name], trained[kind.name]
        assert torch.equal(one.ids, other.ids), kind.name
        assert torch.equal(one.values["scores"], other.values["scores"]), kind.name
        assert one.counts == other.counts, kind.name
        if optimizer == "rowwise" and "column_wise" in "".join(kind.shardings):
            continue  # sums over the columns of a shard
        for key in ("rows", *(key for key in one.values if key.startswith("state"))):
            torch.testing.assert_close(
                one.values[key], other.values[key], rtol=2e-4, atol=2e-5, msg=f"{kind.name} {key}"
            )


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adam", "rowwise", "8 bits"])
def test_the_same_sharding_goes_on_bit_for_bit(
    two_ranks: Ranks, tmp_path: Path, optimizer: str
) -> None:
    """Tables with and without eviction and timestamps, on ranks with different clocks."""
    kinds = tuple(
        Kind(f"{policy}_{sharding}", (sharding, sharding), policy, pooling)
        for policy in POLICIES
        for sharding, pooling in (
            ("row_wise", "sum"),
            ("column_wise", "sum"),
            ("table_wise", "none"),
        )
    )
    path, ahead, more = str(tmp_path / "saved"), (0, 7), range(3, 7)
    straight = two_ranks.run(save_model, kinds, 0, optimizer, path, SAVED, more, ahead)
    for before in (range(0), range(2)):  # an empty model, and one that has learnt already
        how = How(before=before, more=more, ahead=ahead)
        resumed = two_ranks.run(load_model, kinds, 1, optimizer, path, how)
        for one, other in zip(straight, resumed, strict=True):
            assert other.report is not None
            assert all(of.exact and not of.fresh for of in other.report.tables.values())
            for mine, loaded in zip(one.after, other.after, strict=True):
                assert equal_shards(mine, loaded), mine.table
            if not before:  # else handles tell rows that were given back from new ones
                assert same(one.raw, other.raw)
    assert any(int(raw["tables"][:, Table.EVICTED].sum()) > 0 for of in straight for raw in of.raw)


def test_ranks_agree_on_the_time_after_a_load(two_ranks: Ranks, tmp_path: Path) -> None:
    kinds = tuple(
        Kind(f"{a}_{b}", (a, b), "times")
        for a, b in (("row_wise", "column_wise"), ("table_wise", "row_wise"))
    )
    path = str(tmp_path / "saved")
    saved = two_ranks.run(save_model, kinds, 0, "sgd", path, SAVED, range(0), (0, 7))
    how = How(before=range(2), more=MORE, ahead=(3, 0))
    loaded = two_ranks.run(load_model, kinds, 1, "sgd", path, how)
    latest = {shard.proposed for of in saved for shard in of.shards if shard.proposed}
    for of in loaded:
        for shard in of.shards:
            assert (shard.clock[1], shard.proposed) == (max(latest), max(latest))
        clocks = {shard.clock for shard in of.after}
        assert clocks == {(MORE.stop, START + 100 * (MORE.stop - 1) + 3)}
    whole_tables([of.after for of in loaded])  # which compares the times of column shards


def test_a_smaller_capacity_keeps_the_largest_scores(two_ranks: Ranks, tmp_path: Path) -> None:
    kinds = tuple(
        Kind(f"{a}_{b}", (a, b), "evicting", capacity=10)
        for a, b in (
            ("row_wise", "table_wise"),
            ("table_wise", "row_wise"),
            ("row_wise", "column_wise"),
            ("column_wise", "column_wise"),
        )
    )
    path = str(tmp_path / "saved")
    saved = two_ranks.run(save_model, kinds, 0, "adam", path, SAVED)
    found = two_ranks.run(load_model, kinds, 1, "adam", path, How(before=range(7, 8)))
    assert found[0].report is not None
    assert_loaded(tables_of(saved), tables_of(found), found[0].report, parts_of_ids(kinds, 1))
    for of in found[0].report.tables.values():
        assert of.ids == 10
        assert of.evicted > 5


def test_state_of_8_bits_stays_with_its_columns(two_ranks: Ranks, tmp_path: Path) -> None:
    def kinds(*pairs: tuple[str, str]) -> tuple[Kind, ...]:
        return tuple(Kind(f"t{k}", pair) for k, pair in enumerate(pairs))

    same = kinds(("row_wise", "table_wise"), ("table_wise", "row_wise"))
    path, other = str(tmp_path / "same"), str(tmp_path / "other")
    saved = two_ranks.run(save_model, same, 0, "8 bits", path, SAVED)
    found = two_ranks.run(load_model, same, 1, "8 bits", path, How())
    assert found[0].report is not None
    assert_loaded(tables_of(saved), tables_of(found), found[0].report, parts_of_ids(same, 1))

    split = kinds(("row_wise", "column_wise"))
    two_ranks.run(save_model, split, 0, "8 bits", other, SAVED)
    for raised, unchanged in two_ranks.run(refused_load, split, 1, "8 bits", other):
        assert (
            "ValueError: table 'bags.t0' was saved with 8-bit exp_avg of columns [(0, 16)], but "
            "columns" in raised
        )
        assert "shard columns as they were, or give optimizer_state=False" in raised
        assert unchanged
    weights = How(options={"optimizer_state": False})
    rows = two_ranks.run(load_model, split, 1, "8 bits", other, weights)
    assert rows[0].report is not None
    assert rows[0].report.tables["bags.t0"].fresh == ("optimizer state",)


def test_tables_that_are_not_trained(two_ranks: Ranks, tmp_path: Path) -> None:
    """They take the rows of a trained one, which gets them back without its state."""
    kinds = (Kind("ads", ("row_wise", "table_wise"), trainable=(True, False)),)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    saved = tables_of(two_ranks.run(save_model, kinds, 0, "adam", first, SAVED))
    found = two_ranks.run(load_model, kinds, 1, "adam", first, How(back=second, more=MORE))
    back = two_ranks.run(load_model, kinds, 0, "adam", second, How())
    for of, fresh in ((found, ()), (back, ("optimizer state",))):
        assert of[0].report is not None
        assert of[0].report.tables["bags.ads"].fresh == fresh
        for after in (False, True):
            table = tables_of(of, after)["ads"]
            assert torch.equal(table.ids, saved["ads"].ids)
            assert torch.equal(table.values["rows"], saved["ads"].values["rows"])
    assert not tables_of(back)["ads"].values["state exp_avg"].any()
    refused = two_ranks.run(refused_load, kinds, 0, "adam", second, {"on_missing_state": "error"})
    for raised, unchanged in refused:
        assert "table 'bags.ads' was saved without optimizer state: give on_missing" in raised
        assert unchanged


def test_sketches_are_added_and_resized(two_ranks: Ranks, tmp_path: Path) -> None:
    """No id waits longer than it should: a count is never too small after a load."""
    kinds = tuple(
        Kind(f"{a}_{b}", (a, b), "sketched")
        for a, b in (
            ("row_wise", "table_wise"),
            ("table_wise", "row_wise"),
            ("column_wise", "row_wise"),
            ("row_wise", "row_wise"),
        )
    )
    path = str(tmp_path / "saved")
    saved = two_ranks.run(save_model, kinds, 0, "sgd", path, SAVED)
    loaded = two_ranks.run(load_model, kinds, 1, "sgd", path, How(more=MORE))
    for rank, of in enumerate(loaded):
        for shard in of.shards:
            parts = [
                one.sketch
                for found in saved
                for one in found.shards
                if one.table == shard.table and one.first_column == 0
            ]
            if shard.table == "row_wise_row_wise":
                parts = parts[rank : rank + 1]
            assert shard.sketch is not None
            expected = combined_sketch(parts, shard.sketch.shape[1])
            assert torch.equal(shard.sketch, expected), shard.table
    trained = tables_of(loaded, after=True)
    for kind in kinds:
        bags = [bags_of(names_of(kinds), step)[kind.name] for step in range(MORE.stop)]
        ids, counts = torch.cat([bag for of in bags for bag in of]).unique(return_counts=True)
        assert torch.isin(ids[counts >= 2], trained[kind.name].ids).all(), kind.name


def test_a_step_that_nobody_has_ended(two_ranks: Ranks, tmp_path: Path) -> None:
    """A save ends it, as the next forward would: the model that loads begins another one."""
    kinds = (
        Kind("times", ("row_wise", "row_wise"), "times"),
        Kind("evicting", ("column_wise", "column_wise"), "evicting"),
    )
    for saved, loaded in two_ranks.run(steps_that_nobody_ends, kinds, str(tmp_path / "saved")):
        assert {shard.clock[0] for shard in saved[0]} == {3}
        assert {shard.clock[0] for shard in loaded[0]} == {3}
        for mine, theirs in zip(saved[1], loaded[1], strict=True):
            assert equal_shards(mine, theirs), mine.table


def test_pending_gradients_are_not_saved(two_ranks: Ranks, tmp_path: Path) -> None:
    kinds = (Kind("split", ("row_wise", "row_wise"), split=True),)
    for raised, ids in two_ranks.run(pending_gradients, kinds, str(tmp_path / "saved")):
        assert raised == (
            "RuntimeError: checkpoint.save: tables ['split'] have gradients pending, which are not "
            "saved: call optimizer.step(), or zero_grad(), before"
        )
        assert ids[0] > 5


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adam", "rowwise"])
def test_every_change_over_nodes(four_ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    """Four ranks of two nodes, with shards of rows and of columns in one table."""
    kinds = every_change(("row_wise", "table_row_wise", "grid_shard", "table_column_wise"), ())
    path = str(tmp_path / "saved")
    saved = four_ranks.run(save_model, kinds, 0, optimizer, path, SAVED)
    found = four_ranks.run(load_model, kinds, 1, optimizer, path, How(before=range(1)))
    assert found[0].report is not None
    parts = parts_of_ids(kinds, 1, ranks=4)
    assert_loaded(tables_of(saved), tables_of(found), found[0].report, parts)
    exact = {name.rpartition(".")[2] for name, of in found[0].report.tables.items() if of.exact}
    assert not exact  # tables of one group that were saved in several ones

    alike = tuple(kind for kind in kinds if len(set(kind.shardings)) == 1)
    before = four_ranks.run(save_model, alike, 0, optimizer, path, SAVED)
    after = four_ranks.run(load_model, alike, 1, optimizer, path, How())
    for one, other in zip(before, after, strict=True):
        assert other.report is not None
        assert all(of.exact for of in other.report.tables.values())
        assert same(one.raw, other.raw)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adam", "rowwise"])
def test_four_ranks_two_ranks_and_back(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, optimizer: str
) -> None:
    policies = list(POLICIES)
    kinds = tuple(
        Kind(f"{a}_{b}", (a, b), policies[n % len(policies)])
        for n, (a, b) in enumerate(itertools.product(BAG_SHARDINGS, TWO_RANKS))
    )
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    saved = tables_of(four_ranks.run(save_model, kinds, 0, optimizer, first, SAVED))
    found = two_ranks.run(load_model, kinds, 1, optimizer, first, How(back=second))
    assert found[0].report is not None
    assert_loaded(saved, tables_of(found), found[0].report, parts_of_ids(kinds, 1))
    back = four_ranks.run(load_model, kinds, 0, optimizer, second, How(before=range(1)))
    assert back[0].report is not None
    parts = parts_of_ids(kinds, 0, ranks=4)
    assert_loaded(tables_of(found), tables_of(back), back[0].report, parts)


@pytest.mark.long
def test_increments_of_any_sharding_make_a_whole_checkpoint(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    steps = [range(2), range(2, 3), range(3, 4)]
    # all ids of these have room wherever they are loaded
    roomy = tuple(kind for kind in KINDS if POLICIES[kind.policy].capacity is None)
    two_ranks.run(save_increments, roomy, 0, "adam", str(first), steps)
    td.checkpoint.merge([first / name for name in "012"], first / "merged")
    assert_same_content(first / "merged", first / "whole")
    # other shards go on from it
    begins = str(first / "merged")
    two_ranks.run(save_increments, roomy, 1, "adam", str(second), steps, begins)
    td.checkpoint.merge([begins, second / "1", second / "2"], second / "merged", parts=3)
    assert_same_content(second / "merged", second / "whole")


@pytest.mark.long
def test_increments_of_tables_that_evict_make_a_whole_checkpoint(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    steps = [range(2), range(2, 4)]
    two_ranks.run(save_increments, KINDS, 0, "rowwise", str(tmp_path), steps)
    td.checkpoint.merge([tmp_path / "0", tmp_path / "1"], tmp_path / "merged")
    assert_same_content(tmp_path / "merged", tmp_path / "whole")


def assert_same_content(one: Path, other: Path) -> None:
    found, expected = saved_content(one), saved_content(other)
    assert found.keys() == expected.keys()
    for name, content in expected.items():
        assert same_values(found[name], content), name
