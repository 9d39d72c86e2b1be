"""Tables of other programs in sharded models: each rank takes the ids and columns that it owns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_models import DIM, START, Kind, Whole, whole_tables
from foreign_files import Rows, read_dynamicemb_dump, some_rows, write_dynamicemb
from migration_steps import Loaded, dump, load_dump, load_tensors, refused_dump
from ranks import Ranks
from torch import Tensor

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

SHARDINGS = ("row_wise", "table_wise", "column_wise", "table_column_wise")
KINDS = (
    *(Kind(f"sum_{of}", (of, of)) for of in SHARDINGS),
    Kind("none_row_wise", ("row_wise", "row_wise"), "times", "none"),
    Kind("counted_row_wise", ("row_wise", "row_wise"), "counted"),
)


def path_of(kind: Kind) -> str:
    return f"{'sequences' if kind.pooling == 'none' else 'bags'}.{kind.name}"


def rows_of(kind: Kind, count: int = 60) -> Rows:
    return some_rows(count, DIM, seed=len(kind.name))


def given(kinds: tuple[Kind, ...]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    result = {}
    for kind in kinds:
        rows = rows_of(kind)
        tensors = (torch.from_numpy(of) for of in (rows.ids, rows.values, rows.state["sum"]))
        result[path_of(kind)] = tuple(tensors)
    return result  # type: ignore[return-value]


def assert_holds(whole: Whole, rows: Rows) -> None:
    order = torch.from_numpy(rows.ids).argsort()
    assert torch.equal(whole.ids, torch.from_numpy(rows.ids)[order])
    assert torch.equal(whole.values["rows"], torch.from_numpy(rows.values)[order])
    assert torch.equal(whole.values["state sum"], torch.from_numpy(rows.state["sum"])[order])


def tables_of(found: list[Loaded]) -> dict[str, Whole]:
    return whole_tables([of.shards for of in found])


def test_each_rank_keeps_the_ids_and_columns_that_it_owns(two_ranks: Ranks) -> None:
    found = two_ranks.run(load_tensors, KINDS, "adagrad", given(KINDS))
    held = tables_of(found)
    for kind in KINDS:
        assert_holds(held[kind.name], rows_of(kind))
        assert held[kind.name].steps == 5
    assert [of.error for of in found] == ["", ""]
    assert found[0].report == found[1].report
    assert {name: of[0] for name, of in found[0].report.items()} == {
        path_of(kind): 60 for kind in KINDS
    }
    by_rank = [{shard.table: shard.ids.numel() for shard in of.shards} for of in found]
    assert all(0 < of["sum_row_wise"] < 60 for of in by_rank)


def test_an_id_twice_is_found_by_one_rank_and_raised_by_all(two_ranks: Ranks) -> None:
    kinds = KINDS[:2]
    sources = given(kinds)
    ids, *others = sources[path_of(kinds[0])]
    ids[7] = ids[9]
    sources[path_of(kinds[0])] = (ids, *others)  # type: ignore[assignment]
    found = two_ranks.run(load_tensors, kinds, "adagrad", sources)
    assert all(f"gets from read_tensors an id twice: {int(ids[7])}, " in of.error for of in found)
    untouched = two_ranks.run(load_tensors, kinds, "adagrad", {})
    for mine, theirs in zip(found, untouched, strict=True):
        for one, other in zip(mine.after, theirs.after, strict=True):
            assert torch.equal(one.ids, other.ids)
            assert torch.equal(one.values["rows"], other.values["rows"])


def test_a_dump_of_three_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    counter = {2**40 + 1: 1, -(2**41): 1}
    for kind in KINDS:
        folder = tmp_path / f"model.{path_of(kind).rpartition('.')[0]}"
        rows = rows_of(kind)
        rows.scores = {"time": (START + np.arange(60)) * 10**9, "frequency": np.arange(1, 61)}
        write_dynamicemb(
            folder,
            kind.name,
            rows,
            ranks=3,
            options={"opt_type": "exact_adagrad", "lr": 0.1},
            scores=["time", "frequency"] if kind.policy == "times" else [],
            state=["sum"],
            counter=counter if kind.policy == "counted" else None,
        )
    held = tables_of(two_ranks.run(load_dump, KINDS, "adagrad", str(tmp_path)))
    for kind in KINDS:
        assert_holds(held[kind.name], rows_of(kind))
    assert held["counted_row_wise"].counts == counter
    scores = held["none_row_wise"].values["scores"][:, 1:3]
    order = torch.from_numpy(rows_of(KINDS[4]).ids).argsort()
    times = torch.stack([START + torch.arange(60), torch.arange(1, 61)], 1)
    assert torch.equal(scores, times[order])


def test_what_two_ranks_dump_is_what_they_hold(two_ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "dump"
    held = whole_tables(two_ranks.run(dump, KINDS, "adagrad", str(path)))
    for kind in KINDS:
        folder = path / f"model.{path_of(kind).rpartition('.')[0]}"
        dumped, options = read_dynamicemb_dump(folder, kind.name, DIM)
        order = dumped.ids.argsort()
        whole = held[kind.name]
        assert np.array_equal(dumped.ids[order], whole.ids.numpy())
        assert np.array_equal(dumped.values[order], whole.values["rows"].numpy())
        assert np.array_equal(dumped.state["all"][order], whole.values["state sum"].numpy())
        assert options["opt_type"] == "exact_adagrad"
    again = tables_of(two_ranks.run(load_dump, KINDS, "adagrad", str(path)))
    for name, whole in held.items():
        assert torch.equal(again[name].ids, whole.ids)
        assert torch.equal(again[name].values["rows"], whole.values["rows"])
        assert again[name].counts == whole.counts


def test_a_damaged_dump_raises_on_both_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    kind = KINDS[0]
    folder = tmp_path / "model.bags"
    options = {"opt_type": "exact_adagrad"}
    write_dynamicemb(folder, kind.name, rows_of(kind), options=options, state=["sum"])
    values = folder / f"{kind.name}_emb_values.rank_0.world_size_1"
    np.fromfile(values, "<f4")[:-1].tofile(values)
    found = two_ranks.run(load_dump, (kind,), "adagrad", str(tmp_path))
    assert all("cut off" in of.error for of in found)
    assert all(shard.ids.numel() == 0 for of in found for shard in of.shards)


def test_state_by_row_of_column_shards_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    errors = two_ranks.errors(refused_dump, (KINDS[2],), "rowwise", str(tmp_path / "dump"))
    assert all("shard it by rows, or give optim=False" in error for error in errors)
    assert not list((tmp_path / "dump").rglob("*"))
