"""Rows that are set from outside: what insert_or_assign writes, refuses and takes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from group_calls import snapshot, train, unchanged
from torch import Tensor
from whole_group import check_whole

import torch_dynemb as td
from torch_dynemb.ops.columns import Slab
from torch_dynemb.table.content import read_content

pytestmark = pytest.mark.any_device

DIM = 8
OPTIMIZERS = {
    "SGD": td.SGD(lr=0.1),
    "Adam": td.Adam(lr=0.1),
    "Adam with steps of rows": td.Adam(lr=0.1, row_steps=True, state_dtype=torch.bfloat16),
    "Adam with 8 bits": td.Adam(lr=0.1, state_dtype=torch.uint8),
    "Adagrad from 0.5": td.Adagrad(
        lr=0.1, initial_accumulator_value=0.5, state_dtype=torch.bfloat16
    ),
    "RowWiseAdagrad from 0.5": td.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.5),
    "Ftrl": td.Ftrl(lr=0.1),
}


def make_group(optimizer: Any = None, **options: Any) -> td.TableGroup:
    """Two tables of one slab, so that their rows lie between each other."""
    dtype = options.pop("dtype", torch.float32)
    policy = options.pop("policy", None)
    tables = [td.TableConfig(name, DIM, dtype=dtype) for name in "ab"]
    if policy is not None:
        tables[0] = td.TableConfig("a", DIM, dtype=dtype, policy=policy)
    return td.TableGroup(
        tables, optimizer=optimizer or td.Adam(lr=0.1), max_rows=2000, seed=3, **options
    )


def values(count: int, seed: int = 0) -> Tensor:
    cpu = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(count, DIM, generator=cpu, device="cpu").to(torch.get_default_device())


def content(group: td.TableGroup) -> dict[int, tuple[list[float], dict[str, list[float]]]]:
    """Row and state of every id of the first table."""
    group.materialize()
    read = read_content(group.tables, 0)
    state = {name: tensor.tolist() for name, tensor in read.state.items()}
    return {
        id: (read.rows[i].tolist(), {name: state[name][i] for name in state})
        for i, id in enumerate(read.ids.tolist())
    }


def fresh_state(optimizer: Any, dtype: torch.dtype) -> dict[str, list[float]]:
    """Return the state of a row with a written initial value, and nothing else."""
    group = make_group(optimizer, dtype=dtype)
    group.insert(0, torch.tensor([1]))
    return content(group)[1][1]


def freed(group: td.TableGroup) -> Tensor:
    """Train and remove; return ids with rows scattered among those of others."""
    for step in range(3):
        train(group, 0, torch.arange(60), values(60, step))
        train(group, 1, torch.arange(20), values(20, step))
    group.erase(0, torch.tensor([3, 50, 7, 8, 9, 31]))
    return torch.tensor([0, 1, 59, 20])


# Groups before the call, and the ids that get rows.


def nobody_before(group: td.TableGroup) -> Tensor:
    return torch.arange(100, 200)


def rows_follow_those_of_others(group: td.TableGroup) -> Tensor:
    freed(group)
    group.insert(0, torch.arange(300, 306))  # takes what was free
    return torch.arange(100, 200)


def freed_rows_only(group: td.TableGroup) -> Tensor:
    freed(group)
    return torch.tensor([100, 5000, -4])


def freed_rows_that_follow_each_other(group: td.TableGroup) -> Tensor:
    freed(group)
    for id in (13, 12, 11):  # the row that was freed last is given out first
        group.erase(0, torch.tensor([id]))
    return torch.tensor([100, 5000, -4])


def freed_and_new_rows(group: td.TableGroup) -> Tensor:
    freed(group)
    return torch.arange(100, 200)


def known_ids(group: td.TableGroup) -> Tensor:
    return freed(group)


def known_ids_that_follow_each_other(group: td.TableGroup) -> Tensor:
    freed(group)
    return torch.arange(10, 30)


def known_ids_without_a_row_yet(group: td.TableGroup) -> Tensor:
    freed(group)
    group.insert(0, torch.arange(300, 340))
    return torch.arange(300, 340)


def known_and_new_rows_that_follow_each_other(group: td.TableGroup) -> Tensor:
    train(group, 0, torch.arange(60), values(60))
    return torch.arange(40, 120)


def all_kinds_of_ids(group: td.TableGroup) -> Tensor:
    some = freed(group)
    group.insert(0, torch.arange(300, 304))
    return torch.cat([torch.arange(400, 450), some, torch.arange(302, 310)])


def rows_given_back(group: td.TableGroup) -> Tensor:
    """Their generation says that they had owners; a GPU leaves their state where it was, too."""
    freed(group)
    group.erase(0, torch.arange(20, 60))
    used = int(group.index.slabs[0, Slab.NEXT_ROW])
    group.compact()
    for state in group.rows.state:
        state[int(group.index.slabs[0, Slab.NEXT_ROW]) : used] = 1
    return torch.arange(100, 100 + used - int(group.index.slabs[0, Slab.NEXT_ROW]))


def state_left_in_rows_without_owner(group: td.TableGroup) -> Tensor:
    """A compaction that was stopped has copied state into free rows that were never written."""
    group.insert(0, torch.arange(4))
    used = int(group.index.slabs[0, Slab.NEXT_ROW])
    for id in (3, 2, 1, 0):
        group.erase(0, torch.tensor([id]))
    for state in group.rows.state:
        state[:used] = 1
    return torch.arange(100, 104)


BEFORE = [
    nobody_before,
    rows_follow_those_of_others,
    freed_rows_only,
    freed_rows_that_follow_each_other,
    freed_and_new_rows,
    known_ids,
    known_ids_that_follow_each_other,
    known_ids_without_a_row_yet,
    known_and_new_rows_that_follow_each_other,
    all_kinds_of_ids,
    rows_given_back,
    state_left_in_rows_without_owner,
]


def check_assigned(before: Any, optimizer: Any, dtype: torch.dtype) -> None:
    """Rows are what was given; state of new ids is fresh; all else is as it was."""
    group = make_group(optimizer, dtype=dtype)
    ids = before(group)
    rows = values(ids.numel(), 9)
    known = content(group)
    other = group.read(1, torch.arange(20))
    group.insert_or_assign(0, ids, rows)
    check_whole(group)
    now = content(group)
    assert now.keys() == known.keys() | set(ids.tolist())
    given = dict(zip(ids.tolist(), rows.to(dtype).tolist(), strict=True))
    fresh = fresh_state(optimizer, dtype)
    for id, (row, state) in now.items():
        assert row == (given[id] if id in given else known[id][0]), id
        assert state == (known[id][1] if id in known else fresh), id
    assert torch.equal(group.read(1, torch.arange(20)), other)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_and_state(before: Any, name: str) -> None:
    check_assigned(before, OPTIMIZERS[name], torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("before", BEFORE)
def test_rows_of_two_bytes(before: Any, dtype: torch.dtype) -> None:
    check_assigned(before, OPTIMIZERS["Adagrad from 0.5"], dtype)


def test_new_rows_train_like_rows_of_a_new_table() -> None:
    reused, new = make_group(), make_group()
    freed(reused)
    ids = torch.arange(100, 140)
    for group in (reused, new):
        group.insert_or_assign(0, ids, values(40))
        train(group, 0, ids, values(40, 1))
    # Adam counts the steps of the table: all rows of the one have seen three more
    assert not torch.equal(reused.read(0, ids), new.read(0, ids))
    fourth = make_group()
    for step in range(3):
        train(fourth, 0, torch.arange(60), values(60, step))
    fourth.insert_or_assign(0, ids, values(40))
    train(fourth, 0, ids, values(40, 1))
    assert torch.equal(reused.read(0, ids), fourth.read(0, ids))


def test_no_ids() -> None:
    group = make_group()
    train(group, 0, torch.arange(4), values(4))
    before = snapshot(group)
    group.insert_or_assign(0, torch.zeros(0, dtype=torch.int64), torch.zeros(0, DIM))
    after = snapshot(group)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "ids",
    [
        [7, 7],
        [1000, 1001, 1000],
        [-1, 5, 2**63 - 1, -1],
        [0, *range(1000, 1400), 1399],
        [2, *range(1000, 1400), 2],
        [-(2**63), 0, 4, -(2**63)],
    ],
)
def test_an_id_that_comes_twice_is_refused(ids: list[int]) -> None:
    group = make_group()
    train(group, 0, torch.arange(8), values(8))
    given = torch.tensor(ids)

    def call() -> None:
        with pytest.raises(ValueError, match="ids has repeated ids, expected every id once"):
            group.insert_or_assign(0, given, values(len(ids)))
        raise ValueError

    assert unchanged(group, call) == []


@pytest.mark.parametrize("policy", [None, td.Policy(score="step", capacity=100)])
def test_a_failed_write_takes_the_new_ids_back(
    policy: td.Policy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group(policy=policy)
    freed(group)
    group.step()
    group.insert(0, torch.arange(300, 304))  # known, and not written
    known = content(group)
    group.erase(0, torch.tensor([10, 11]))
    known.pop(10), known.pop(11)
    group.insert(0, torch.tensor([301, 310]))
    new = torch.arange(400, 440)  # into freed rows and new ones
    ids = torch.cat([new[:20], torch.tensor([301, 310, 0, 59]), new[20:]])
    handles = group.find(ids, torch.tensor([0, ids.numel()]), [0]).handles

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory for a copy")

    with monkeypatch.context() as patch:
        patch.setattr("torch_dynemb.table.rows.write_rows", fail)
        with pytest.raises(MemoryError, match="no memory for a copy"):
            group.insert_or_assign(0, ids, values(44))
    assert not bool(group.contains(0, new).any())
    assert torch.equal(group.find(ids, torch.tensor([0, ids.numel()]), [0]).handles, handles)
    check_whole(group)
    assert {id: row for id, row in content(group).items() if id != 310} == known
    group.insert_or_assign(0, ids, values(44))
    assert torch.equal(group.read(0, ids), values(44))


def test_a_failed_write_takes_ids_back_that_had_rows_of_evicted_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = make_group(policy=td.Policy(score="step", capacity=40))
    train(group, 0, torch.arange(40), values(40))
    group.step()
    group.insert(0, torch.arange(20, 40))
    group.step()
    new = torch.arange(100, 110)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory for a copy")

    with monkeypatch.context() as patch:
        patch.setattr("torch_dynemb.table.rows.write_rows", fail)
        with pytest.raises(MemoryError, match="no memory for a copy"):
            group.insert_or_assign(0, torch.cat([torch.arange(20, 30), new]), values(20))
    assert not bool(group.contains(0, new).any())
    assert bool(group.contains(0, torch.arange(20, 40)).all())
    assert group.size(0) == 30  # those that were evicted stay away
    check_whole(group)
    group.insert_or_assign(0, new, values(10))
    assert torch.equal(group.read(0, new), values(10))
