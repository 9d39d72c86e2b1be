"""Checkpoints of sharded models: from any sharding and number of ranks into any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_models import (
    Kind,
    Unsharded,
    Whole,
    every_change,
    shards_of_unsharded,
    train_unsharded,
    whole_tables,
)
from checkpoint_steps import Found, How, load_model, names_of, save_model
from ranks import Ranks

import torch_dynemb as td
from torch_dynemb.checkpoint import LoadReport
from torch_dynemb.distributed.owners import part_of

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
            scores, part = before.values["scores"][:, 0], part_of(before.ids, parts[name])
            for p in range(parts[name]):
                here, gone = scores[(part == p) & kept], scores[(part == p) & ~kept]
                assert gone.numel() == 0 or here.min() >= gone.max(), name
        values = {key: of[kept] for key, of in before.values.items()}
        assert_equal(before._replace(ids=before.ids[kept], values=values), after, name)


def parts_of_ids(kinds: tuple[Kind, ...], side: int) -> dict[str, int]:
    return {kind.name: 2 if kind.shardings[side] == "row_wise" else 1 for kind in kinds}


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
    assert_loaded(
        again, whole_tables([shards_of_unsharded(alone)]), report, dict.fromkeys(again, 1)
    )
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
            continue  # whose sums are of the columns of a shard
        for key in ("rows", *(key for key in one.values if key.startswith("state"))):
            torch.testing.assert_close(
                one.values[key], other.values[key], rtol=2e-4, atol=2e-5, msg=f"{kind.name} {key}"
            )
