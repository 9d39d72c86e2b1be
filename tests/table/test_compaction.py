"""compact(): rows move together, memory goes back; add_table(): a group gets another table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from execution import memory_in_use
from group_calls import bag_lookup, differences, flat_call, train
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import RowClock, Slab, Table

pytestmark = pytest.mark.any_device


def make_group(optimizer: Any = None, **arguments: Any) -> td.TableGroup:
    policy = td.Policy(score="frequency", admission=td.AdmitFrequent(1))
    tables = [
        td.TableConfig("a", 4, policy=policy),
        td.TableConfig("b", 8),
        td.TableConfig("c", 4, policy=td.Policy(admission=td.AdmitFrequent(2))),
    ]
    given = {"optimizer": optimizer or td.Adam(lr=0.1), "seed": 1, **arguments}
    return td.TableGroup(tables, **given)


def content(group: td.TableGroup) -> dict[str, dict[int, tuple[Any, ...]]]:
    """Rows and scores by table and id."""
    return {
        name: {
            int(id): (tuple(row.tolist()), int(score))
            for batch in group.export(t)
            for id, row, score in zip(*batch, strict=True)
        }
        for t, name in enumerate(group.names)
    }


def live(group: td.TableGroup, steps: int, *, seed: int = 0) -> None:
    generator = seeded(seed)
    for _ in range(steps):
        for table, dim in enumerate((4, 8, 4)):
            ids = torch.randint(0, 3000, (500,), generator=generator)
            train(group, table, ids, torch.ones(500, dim))
        group.step()


def remove_most(group: td.TableGroup) -> None:
    for table in range(3):
        group.remove(table, predicate=lambda ids, _: ids % 10 != 0)


def test_memory_is_given_back_and_nothing_else_changes() -> None:
    group, other = make_group(), make_group()
    for each in (group, other):
        live(each, 8)
        remove_most(each)
        each.insert(0, torch.arange(10_000, 10_050))  # not trained: no row is written
    before = content(group)
    memory = group.usage.memory()
    given_back = group.compact()
    assert content(group) == before
    assert given_back == memory["total"] - group.usage.memory()["total"]
    assert group.usage.memory()["total"] < 0.25 * memory["total"]
    for slab in range(2):
        sizes = sum(
            group.size(t)
            for t, config in enumerate(group.config.tables)
            if group.config.slabs[slab] == config.slab
        )
        assert int(group.index.slabs[slab, Slab.NEXT_ROW]) == sizes
        assert int(group.index.slabs[slab, Slab.FREE_COUNT]) == 0
    assert group.compact() == 0
    # training goes on as if nothing had happened
    for each in (group, other):
        live(each, 3, seed=9)
    assert content(group) == content(other)
    assert group.usage.stale_gradients() == 0


@pytest.mark.alone
def test_pages_go_back_to_the_system() -> None:
    table = td.TableConfig("large", 128)
    group = td.TableGroup([table], optimizer=td.Adam(lr=0.1), seed=1)
    ids = torch.arange(60_000)
    train(group, 0, ids, torch.ones(60_000, 128))
    full = memory_in_use()
    group.remove(0, predicate=lambda ids, _: ids >= 1000)
    group.compact()
    assert full - memory_in_use() > 70e6  # of 92 MB
    assert group.size(0) == 1000


def test_outstanding_handles_become_stale_and_are_counted() -> None:
    group = make_group(td.SGD(lr=1.0))
    ids = torch.arange(100)
    group.insert(0, ids)
    output = bag_lookup(group, flat_call(group, 0, torch.arange(90, 100)))
    group.erase(0, torch.arange(50))
    group.compact()
    kept = group.read(0, torch.arange(50, 100))
    updates = len(group.names) + RowClock.UPDATES
    group.insert(0, torch.arange(200, 260))  # takes the rows that the old handles name
    group.rows.row_clock[updates] = 0
    output.sum().backward()
    # ids 90 to 99 had rows 90 to 99, which lie beyond the rows in use
    assert group.usage.stale_gradients() == 10
    assert torch.equal(group.read(0, torch.arange(50, 100)), kept)
    fresh = make_group(td.SGD(lr=1.0))
    new = torch.arange(200, 260)
    assert torch.equal(group.read(0, new), fresh.read(0, new))
    train(group, 0, new, torch.ones(60, 4))
    assert torch.equal(group.read(0, new), fresh.read(0, new) - 1.0)


def test_saving_and_loading_around_a_compaction() -> None:
    group = make_group(max_rows=4000)
    live(group, 4)
    remove_most(group)
    group.compact()
    state = group.state.tensors()
    for target in (make_group(max_rows=4000), group):
        target.state.load(state)
        assert differences(target.state.tensors(), state) == []
    old = make_group(max_rows=4000)
    live(old, 2, seed=3)
    expected = content(old)
    group.state.load(old.state.tensors())  # rows that were given back are used again
    live(group, 2, seed=4)
    live(old, 2, seed=4)
    assert content(group) == content(old) != expected


# -- add_table -----------------------------------------------------------------------------------


def test_a_table_is_added_to_a_group_in_use() -> None:
    group = make_group()
    live(group, 5)
    group.clear(1)
    before = content(group)
    counted = group.usage.tables(wait=True)["c"].counted
    assert counted > 0
    added = td.TableConfig(
        "d", 16, policy=td.Policy(score="timestamp", admission=td.AdmitFrequent(1), capacity=10)
    )
    assert group.add_table(added) == 3
    assert group.config.layout.score_words == ("step", "timestamp", "frequency")
    after = content(group)
    assert after.pop("d") == {}
    assert after == before
    assert group.usage.tables(wait=True)["c"].counted == counted
    train(group, 3, torch.arange(25), torch.ones(25, 16))
    group.step()
    assert group.size(3) == 10
    twin = make_group()
    live(twin, 5)
    twin.clear(1)
    for each in (group, twin):
        live(each, 2, seed=8)
    grown = content(group)
    del grown["d"]
    assert grown == content(twin)


def test_a_collection_gets_a_table_with_its_features() -> None:
    def ids(*names: str) -> dict[str, Tensor]:
        return {name: torch.arange(6).reshape(3, 2) for name in names}

    collection = td.DynamicEmbeddingBagCollection(
        [td.TableConfig("user", 4), td.TableConfig("ad", 8)], optimizer=td.SGD(lr=0.1)
    )
    collection(ids("user", "ad")).sum().backward()
    collection.optimizer.param_groups[0]["lr"] = 0.5
    collection.optimizer.step()
    old = collection.eval()(ids("user", "ad"))
    collection.train()
    collection.add_table(td.TableConfig("shop", 8, ["visited", "bought"]))
    assert collection.feature_names == ["user", "ad", "visited", "bought"]
    new = collection.eval()(ids("user", "ad", "visited", "bought"))
    collection.train()
    assert torch.equal(new[:, :12], old)
    assert [group["name"] for group in collection.optimizer.param_groups] == ["user", "ad", "shop"]
    assert [float(group["lr"]) for group in collection.optimizer.param_groups] == [0.5, 0.1, 0.1]
    collection.optimizer.param_groups[2]["lr"] = 2.0
    collection(ids("user", "ad", "visited", "bought")).sum().backward()
    assert collection.optimizer.updates_since_step() == 1
    collection.optimizer.step()
    assert collection.sizes() == {"user": 6, "ad": 6, "shop": 6}
    moved = collection.eval()(ids("user", "ad", "visited", "bought")) - new
    torch.testing.assert_close(moved[:, :4], torch.full((3, 4), -1.0))  # 2 ids * 0.5
    torch.testing.assert_close(moved[:, 12:], torch.full((3, 16), -8.0))  # 2 ids * 2 * 2.0


def test_tables_that_do_not_fit_are_not_added() -> None:
    collection = td.DynamicEmbeddingCollection(
        [td.TableConfig("user", 4)], optimizer=td.SGD(lr=0.1), memory_budget="1MB"
    )
    for table, message in (
        (td.TableConfig("user", 4, ["x"]), "2 tables are named 'user'"),
        (td.TableConfig("item", 4, ["user"]), r"features \['user'\] of table 'item' belong to"),
        (td.TableConfig("item", 8), "embedding_dim 8, expected 4, that of the others"),
        (td.TableConfig("item", 4, policy=td.Policy(on_full="grow")), "has a memory budget"),
    ):
        with pytest.raises(ValueError, match=message):
            collection.add_table(table)
        assert collection.group.names == ["user"]
        assert len(collection.optimizer.param_groups) == 1
    collection({"user": torch.arange(5)})["user"].sum().backward()
    assert int(collection.group.index.tables[0, Table.SIZE]) == 5


def test_rows_behind_those_of_an_earlier_compaction_are_new() -> None:
    """The last ids to go have older handles than the rows that were given back before them."""

    def group() -> td.TableGroup:
        config = td.TableConfig("x", 4, initializer=td.Uniform(-1.0, 1.0))
        return td.TableGroup([config], optimizer=td.SGD(lr=0.1), seed=3)

    fresh, compacted = group(), group()
    ids = torch.arange(40)
    compacted.insert_or_assign(0, ids, torch.ones(40, 4))
    for gone in (ids[1:17], ids[17:], ids[:1]):  # rows move to those of the first ones
        compacted.erase(0, gone)
        compacted.compact()
    for one in (fresh, compacted):
        one.insert(0, ids + 100)
    assert torch.equal(fresh.read(0, ids + 100), compacted.read(0, ids + 100))
