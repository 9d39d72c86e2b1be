"""Checkpoints of RecIS's modules: on any number of ranks, whatever the physical tables are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_content import same, saved_content
from engine_checkpoints import (
    Child,
    Trained,
    contents,
    load_engine,
    one_group_each,
    save_engine,
    save_engine_increments,
    with_options,
)
from held_disk import files_of, held_disk
from lookups import embedding
from ranks import Ranks
from torch import nn

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.recis import HashTable, SparseAdam, filter_out_sparse_param, gen_slice

pytestmark = pytest.mark.cpu_only("several processes over gloo")

CHILDREN = ["content", "counted", "item", "user", "wide"]


def merged(of_ranks: list[dict[str, Child]]) -> dict[str, Child]:
    """What the ranks have together, each id once."""
    result: dict[str, Child] = {}
    for of_rank in of_ranks:
        for name, child in of_rank.items():
            known = result.setdefault(name, Child({}, {}, child.steps))
            assert known.values.keys().isdisjoint(child.values)
            assert known.counts.keys().isdisjoint(child.counts)
            assert known.steps == child.steps
            result[name] = Child(
                known.values | child.values, known.counts | child.counts, child.steps
            )
    return result


def assert_same(one: dict[str, Child], other: dict[str, Child], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, child in one.items():
        assert child.values.keys() == other[name].values.keys(), name
        assert (child.counts, child.steps) == (other[name].counts, other[name].steps), name
        for id, values in child.values.items():
            for key, value in values.items():
                # rows of 8 bits are bits that need not be numbers
                found = other[name].values[id][key]
                if tolerance == 0 or name == "content":
                    same = value.dtype == found.dtype and torch.equal(
                        value.view(torch.uint8), found.view(torch.uint8)
                    )
                    assert same, (name, id, key)
                else:
                    torch.testing.assert_close(value, found, rtol=tolerance, atol=tolerance)


def test_two_ranks_one_process_and_back(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    saved, straight, _ = zip(*two_ranks.run(save_engine, first, range(3), range(3, 5)), strict=True)
    alone = Trained(0, 1, seed=9, filled=False)
    alone.train(range(8, 9))
    report = td.checkpoint.load(first, alone.engine)
    assert sorted(report.tables) == CHILDREN
    whole = contents(alone.engine)
    assert_same(merged(list(saved)), whole)
    assert len(whole["content"].values) == 40
    assert whole["counted"].counts

    td.checkpoint.save(second, alone.engine)
    loaded, after, reports, _ = zip(*two_ranks.run(load_engine, second, range(3, 5)), strict=True)
    assert_same(whole, merged(list(loaded)))
    assert reports[0].tables == reports[1].tables
    alone.train(range(3, 5))
    assert_same(contents(alone.engine), merged(list(after)), 1e-4)
    assert_same(contents(alone.engine), merged(list(straight)), 1e-4)


@pytest.mark.long_cases("False")
@pytest.mark.parametrize("filters", [False, True])
def test_the_same_ranks_go_on_bit_for_bit(two_ranks: Ranks, tmp_path: Path, filters: bool) -> None:
    """With a filter, it removes rows in the same step as if nothing had happened."""
    path, more = str(tmp_path / "saved"), range(4, 9)
    straight = two_ranks.run(save_engine, path, range(4), more, filters)
    resumed = two_ranks.run(load_engine, path, more, filters)
    for one, other in zip(straight, resumed, strict=True):
        assert [name for name, of in other[2].tables.items() if of.fresh or not of.exact] == []
        assert_same(one[1], other[1])
        for mine, loaded in zip(one[2], other[3], strict=True):
            for name, value in mine.items():
                assert value.numpy().tobytes() == loaded[name].numpy().tobytes(), name
    if filters:
        saved, after = (straight[0][k]["item"].values.keys() for k in range(2))
        assert saved - after


def test_an_asynchronous_save_is_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All writes of rows come before the thread has read any."""
    trained = Trained(0, 1)
    trained.train(range(3))
    td.checkpoint.save(tmp_path / "stopped", trained.engine)
    with held_disk(monkeypatch) as disk:
        handle = td.checkpoint.save(tmp_path / "training", trained.engine, asynchronous=True)
        disk.wait_until_reached()
        trained.train(range(3, 5))
        assert not handle.done()
        disk.let_go()
        handle.wait()
    assert files_of(tmp_path / "training") == files_of(tmp_path / "stopped")


def test_names_are_those_of_modules_and_children(tmp_path: Path) -> None:
    model = nn.Module()
    model.engine = Trained(0, 1).engine
    model.single = embedding("single")
    model.table = with_options(coalesced=True, children=["a", "b"])
    model.single(torch.arange(4)[:, None])
    td.checkpoint.save(tmp_path / "saved", model)
    other = nn.Module()
    other.engine = Trained(0, 1, filled=False).engine
    other.single = embedding("single")
    other.table = with_options(coalesced=True, children=["b", "a"])
    SparseAdam(filter_out_sparse_param(other), lr=0.1)
    report = td.checkpoint.load(tmp_path / "saved", other)
    assert sorted(report.tables) == [
        *(f"engine.{child}" for child in CHILDREN),
        "single.single",
        "table.a",
        "table.b",
    ]
    assert report.tables["single.single"].ids == 4


def test_ranks_with_tables_of_their_own(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank, (raised, ids, loaded) in enumerate(
        two_ranks.run(one_group_each, str(tmp_path / "saved"))
    ):
        assert raised == (
            "checkpoint: table 'item' has the same ids on ranks 0 and 1, which is not one sharded "
            "table: give process_group=, the ranks that share their tables"
        )
        assert (ids, loaded) == (4 + rank, list(range(4 + rank)))


def test_an_optimizer_before_and_after_the_load(tmp_path: Path) -> None:
    """State needs an optimizer that takes it; rows that were never trained need none."""
    path, bare = tmp_path / "trained", tmp_path / "bare"
    ids = torch.arange(6)[:, None]
    trained = embedding()
    td.checkpoint.save(bare, trained)
    optimizer = SparseAdam(filter_out_sparse_param(trained), lr=0.1)
    trained(ids).sum().backward()
    with pytest.raises(RuntimeError, match=r"tables \['item'\] have gradients pending"):
        td.checkpoint.save(path, trained)
    assert not path.exists()
    optimizer.step()
    td.checkpoint.save(path, trained)

    later = embedding()
    later(ids + 3)
    before = later.hashtable.embeddings()
    with pytest.raises(ValueError, match=r"saved with the optimizer Adam .* has none yet"):
        td.checkpoint.load(path, later)
    assert torch.equal(later.hashtable.embeddings(), before)
    report = td.checkpoint.load(path, later, optimizer_state=False)
    assert report.tables["item"].fresh == ()
    SparseAdam(filter_out_sparse_param(later), lr=0.1)
    assert torch.equal(later.hashtable.embeddings(), trained.hashtable.embeddings())
    assert not later.hashtable.slot_group()["exp_avg"].any()
    assert int(later.hashtable.group.rows.row_clock[0]) == 0

    ready = embedding()
    SparseAdam(filter_out_sparse_param(ready), lr=0.1)
    assert td.checkpoint.load(path, ready).tables["item"].exact
    assert_same(contents(trained), contents(ready))
    report = td.checkpoint.load(bare, ready)
    assert report.tables["item"].fresh == ("optimizer state",)
    with pytest.raises(ValueError, match="'item' was saved without optimizer state"):
        td.checkpoint.load(bare, ready, on_missing_state="error")


def test_slices_of_a_table(tmp_path: Path) -> None:
    """A process on its own loads its slice of a whole table; a slice alone cannot be saved."""
    whole = with_options()
    ids = torch.arange(-40, 40)
    whole.insert(ids, torch.randn(80, 4))
    td.checkpoint.save(tmp_path / "whole", whole)
    parts = [with_options(slice=gen_slice(k, 3, 64)) for k in range(3)]
    for k, part in enumerate(parts):
        td.checkpoint.load(tmp_path / "whole", part)
        own = ops.id_owners(ids, parts=3, slots=64) == k
        assert torch.equal(part.ids(), ids[own])
        assert torch.equal(part.embeddings(), whole.embeddings()[own])
    with pytest.raises(ValueError, match="'hashtable' has no ids of slots 22 to 64 on ranks"):
        td.checkpoint.save(tmp_path / "part", parts[0])


def test_rows_of_8_bits_are_no_floats(tmp_path: Path) -> None:
    packed = with_options(dtype=torch.int8)
    packed.insert(torch.arange(3), torch.randn(3, 4))
    td.checkpoint.save(tmp_path / "packed", packed)
    columns = packed.group.config.tables[0].embedding_dim
    floats = HashTable([columns])
    for dtype in (torch.float32, torch.bfloat16):
        floats = HashTable([columns], dtype=dtype)
        shown = str(dtype).removeprefix("torch.")
        with pytest.raises(
            ValueError, match=f"rows of packed int8, but the model's are of {shown}"
        ):
            td.checkpoint.load(tmp_path / "packed", floats)
    td.checkpoint.save(tmp_path / "floats", HashTable([columns]))
    with pytest.raises(ValueError, match="rows of float32, but the model's are of packed int8"):
        td.checkpoint.load(tmp_path / "floats", packed)
    td.checkpoint.reshard(tmp_path / "packed", tmp_path / "two", parts=2)
    for name in ("packed", "two"):
        with td.checkpoint.open(tmp_path / name) as saved:
            assert saved.tables["hashtable"].packed
        again = with_options(dtype=torch.int8)
        td.checkpoint.load(tmp_path / name, again)
        assert torch.equal(again.embeddings(), packed.embeddings())
    with pytest.raises(ValueError, match="export: table 'hashtable' has rows of 8 bits"):
        td.checkpoint.export(tmp_path / "packed", tmp_path / "npz", file_format="npz")
    assert not (tmp_path / "npz").exists()


def test_increments_of_an_engine_make_a_whole_checkpoint(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_engine_increments, str(tmp_path))
    td.checkpoint.merge([tmp_path / name for name in "012"], tmp_path / "merged")
    merged, whole = (saved_content(tmp_path / name) for name in ("merged", "whole"))
    assert merged.keys() == whole.keys()
    for name, content in whole.items():
        packed = name.endswith("content")  # rows of 8 bits are bits that need not be numbers
        rows = [of.rows.view(torch.int32) if packed else of.rows for of in (merged[name], content)]
        assert torch.equal(*rows), name
        none = torch.empty(0)
        assert same(merged[name]._replace(rows=none), content._replace(rows=none)), name
