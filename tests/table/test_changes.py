"""Changed and removed ids: what readers of changes get, whatever happens to the tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from group_calls import train
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.table.changes import read_changes, reader_of, record_changes, take_changes

pytestmark = pytest.mark.any_device

DIM = 4
IDS = 60
Content = dict[int, tuple[Any, ...]]


def content(group: td.TableGroup, table: int, scores: bool) -> Content:
    """By id: the bits of its row, state and scores."""
    group.materialize()
    slab, slabs = group.config.slab_of(table), len(group.config.slabs)
    result: Content = {}
    for batch in group.export(table):
        handles = group.find(batch.ids, torch.tensor([0, batch.ids.numel()]), [table]).handles
        rows = handles >> 28
        tensors = [group.rows.weights[slab], *group.rows.state[slab::slabs]]
        values = [tensor[rows].reshape(rows.numel(), -1).tolist() for tensor in tensors]
        words = group.config.tables[table].policy.scores if scores else ()
        values += [
            group.scores.get(table, batch.ids, score=word).scores.reshape(-1, 1).tolist()
            for word in words
            if word != "none"
        ]
        for k, id in enumerate(batch.ids.tolist()):
            result[id] = tuple(tuple(of[k]) for of in values)
    return result


def act(group: td.TableGroup, table: int, action: int, ids: Tensor) -> None:
    if action < 4:
        train(group, table, ids, torch.randn(ids.numel(), DIM))
        group.step()
    elif action == 4:
        group.insert(table, ids)
    elif action == 5:
        group.erase(table, ids)
    elif action == 6:
        distinct = ids.unique()
        group.insert_or_assign(table, distinct, torch.randn(distinct.numel(), DIM))
    elif action == 7:
        group.erase(table, ids)
        group.insert(table, ids[ids.numel() // 2 :])
    elif action == 8:
        group.compact()
    elif action == 9:
        group.remove(table, predicate=lambda ids, _: ids % 5 == 0)
    else:
        group.clear(table)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scored", [False, True])
def test_what_is_told_is_what_differs(seed: int, scored: bool) -> None:
    policy = td.Policy(capacity=24, score="step") if scored else td.Policy()
    tables = [
        td.TableConfig("a", DIM, policy=policy),
        td.TableConfig("b", DIM, initializer=td.Uniform(-1, 1)),
    ]
    group = td.TableGroup(tables, optimizer=td.Adam(lr=0.1), max_rows=300, seed=seed)
    readers = [
        record_changes(group.tables, "all", scores=True),
        record_changes(group.tables, "rows", scores=False),
    ]
    generator = torch.Generator(device="cpu").manual_seed(seed)
    known: list[list[Content]] = [[{}, {}], [{}, {}]]
    for _ in range(25):
        moved = False
        for _ in range(int(torch.randint(0, 4, (), generator=generator, device="cpu"))):
            action = int(torch.randint(0, 11, (), generator=generator, device="cpu"))
            ids = torch.randint(0, IDS, (12,), generator=generator, device="cpu")
            act(group, action % 2, action, ids.to(group.device))
            moved |= action == 8
        for number, reader in enumerate(readers):
            if number == 1 and not scored and seed % 2:
                continue  # one of the readers asks less often
            changes = read_changes(group.tables, reader)
            for table, told in enumerate(changes.tables):
                now = content(group, table, scores=reader.scores)
                before = known[number][table]
                changed = {id for id, values in now.items() if before.get(id) != values}
                ids = set(told.ids.tolist())
                assert len(ids) == told.ids.numel()
                assert changed <= ids <= set(now)
                assert set(told.removed.tolist()) == set(before) - set(now)
                if not moved:  # rows that move count as changed
                    assert len(ids) <= len(changed) + 48
                known[number][table] = now
            take_changes(group.tables, reader, changes, "here")
    assert reader_of(group.tables, "all") is readers[0]


def test_what_was_not_touched_is_not_told() -> None:
    group = td.TableGroup([td.TableConfig("a", DIM)], optimizer=td.SGD(lr=0.1), max_rows=200)
    reader = record_changes(group.tables, "reader", scores=True)
    train(group, 0, torch.arange(100), torch.ones(100, DIM))
    take_changes(group.tables, reader, read_changes(group.tables, reader), "first")
    assert read_changes(group.tables, reader).tables[0].ids.numel() == 0
    train(group, 0, torch.tensor([7, 7, 150]), torch.ones(3, DIM))
    group.erase(0, torch.tensor([8]))
    for _ in range(2):  # to read does not forget
        told = read_changes(group.tables, reader).tables[0]
        assert told.ids.sort().values.tolist() == [7, 150]
        assert told.removed.tolist() == [8]
    found = group.find(told.ids, torch.tensor([0, 2]), [0])
    assert torch.equal(found.handles, told.handles)


def test_readers_do_not_disturb_each_other_and_there_are_eight() -> None:
    group = td.TableGroup([td.TableConfig("a", DIM)], optimizer=td.SGD(lr=0.1), max_rows=50)
    readers = [record_changes(group.tables, str(k), scores=False) for k in range(8)]
    assert record_changes(group.tables, "3", scores=False) is readers[3]
    for reader in readers:
        take_changes(group.tables, reader, read_changes(group.tables, reader), "first")
    train(group, 0, torch.tensor([4]), torch.ones(1, DIM))
    for reader in readers:
        changes = read_changes(group.tables, reader)
        assert changes.tables[0].ids.tolist() == [4]
        take_changes(group.tables, reader, changes, "second")
    with pytest.raises(RuntimeError, match="room for 8 readers"):
        record_changes(group.tables, "one more", scores=False)


@pytest.mark.parametrize("split", [False, True])
def test_the_rows_are_those_that_training_without_readers_gives(split: bool) -> None:
    def trained(recorded: bool) -> td.DynamicEmbeddingBag:
        torch.manual_seed(1)
        bag = td.DynamicEmbeddingBag(
            DIM, mode="sum", name="bag", optimizer=td.Adam(lr=0.1), split=split
        )
        for step in range(4):
            if recorded and step == 2:
                reader = record_changes(bag.group.tables, "reader", scores=False)
            bag(torch.arange(step, step + 9).view(3, 3)).square().sum().backward()
            bag.optimizer.step()
        if recorded:
            take_changes(bag.group.tables, reader, read_changes(bag.group.tables, reader), "here")
            bag(torch.tensor([[2]])).sum().backward()
            bag.optimizer.step()
            told = read_changes(bag.group.tables, reader).tables[0]
            assert told.ids.tolist() == [2]
        else:
            bag(torch.tensor([[2]])).sum().backward()
            bag.optimizer.step()
        return bag

    plain, recorded = trained(False), trained(True)
    assert content(plain.group, 0, False) == content(recorded.group, 0, False)


@pytest.mark.traced
def test_a_compiled_step_records_changes() -> None:
    bag = td.DynamicEmbeddingBag(
        DIM, mode="sum", optimizer=td.SGD(lr=0.1), policy=td.Policy(capacity=64)
    )
    compiled = torch.compile(bag, fullgraph=True, backend="aot_eager")
    compiled(torch.arange(6).view(2, 3)).sum().backward()
    reader = record_changes(bag.group.tables, "reader", scores=False)
    take_changes(bag.group.tables, reader, read_changes(bag.group.tables, reader), "here")
    compiled(torch.tensor([[1, 1, 4], [1, 4, 4]])).sum().backward()
    assert read_changes(bag.group.tables, reader).tables[0].ids.sort().values.tolist() == [1, 4]


def test_a_state_that_is_loaded_is_new_to_all_readers() -> None:
    def group() -> td.TableGroup:
        return td.TableGroup([td.TableConfig("a", DIM)], optimizer=td.SGD(lr=0.1), max_rows=50)

    source, target = group(), group()
    train(source, 0, torch.arange(5), torch.ones(5, DIM))
    reader = record_changes(target.tables, "reader", scores=False)
    train(target, 0, torch.arange(5), torch.ones(5, DIM))
    take_changes(target.tables, reader, read_changes(target.tables, reader), "here")
    target.state.load(source.state.tensors())
    assert reader.since is None
    assert read_changes(target.tables, reader).tables[0].ids.numel() == 5


def test_tables_that_take_the_place_of_others_have_no_readers() -> None:
    group = td.TableGroup([td.TableConfig("a", DIM)], optimizer=td.SGD(lr=0.1), max_rows=50)
    record_changes(group.tables, "reader", scores=False)
    group.set_optimizer(td.Adam(lr=0.1))
    assert reader_of(group.tables, "reader") is None
    train(group, 0, torch.arange(3), torch.ones(3, DIM))
    assert record_changes(group.tables, "reader", scores=False).since is None
