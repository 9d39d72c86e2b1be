"""The index of a table group: ids, handles, rows and generations, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collisions import bucket_of as bucket_of_hashes
from collisions import first_hashes, ids_in_first_buckets, ids_in_one_bucket, second_hash
from group_calls import call_of, differences, raises_in_step, snapshot, train, unchanged
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import BUCKET_WIDTH, MAX_LOAD_PERCENT, Slab, Table

pytestmark = pytest.mark.any_device

EXTREMES = [0, -1, 1, -(1 << 63), (1 << 63) - 1, 1 << 32, -(1 << 32)]
FIRST_BUCKETS = 64 // BUCKET_WIDTH


def make_group(
    dims: tuple[int, ...] = (4,),
    *,
    optimizer: Any = None,
    max_rows: int = 1000,
    padding_idx: int | None = None,
    score: Any = "none",
) -> td.TableGroup:
    tables = [
        td.TableConfig(
            f"t{t}",
            dim,
            padding_idx=padding_idx if t == 0 else None,
            policy=td.Policy(score=score),
        )
        for t, dim in enumerate(dims)
    ]
    return td.TableGroup(tables, optimizer=optimizer or td.SGD(lr=0.1), max_rows=max_rows, seed=3)


def rows_of(handles: Tensor) -> list[int]:
    return (handles >> 28).tolist()


def generations_of(handles: Tensor) -> list[int]:
    return (handles & ((1 << 28) - 1)).tolist()


def tensor(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


# -- rows and generations ----------------------------------------------------------------------


def test_rows_in_order_of_first_occurrence() -> None:
    group = make_group()
    handles = group.insert(0, tensor([50, 7, 50, -3, 7, 9]))
    assert rows_of(handles) == [0, 1, 0, 2, 1, 3]
    assert generations_of(handles) == [1] * 6
    assert rows_of(group.insert(0, tensor([9, 100, 50]))) == [3, 4, 0]


def test_tables_of_one_dim_share_rows_and_others_do_not() -> None:
    group = make_group((4, 8, 4))
    call = call_of(group, [(0, [[1, 2]]), (1, [[1, 2]]), (2, [[1, 2]])])
    handles = group.find_or_insert(call.ids, call.offsets, call.tables)
    assert rows_of(handles) == [0, 1, 0, 1, 2, 3]
    assert group.index.slabs[:, Slab.NEXT_ROW].tolist() == [4, 2]
    assert group.sizes() == {"t0": 2, "t1": 2, "t2": 2}


def test_features_of_one_table_share_ids() -> None:
    group = make_group()
    call = call_of(group, [(0, [[5, 6]]), (0, [[6, 7]])])
    handles = group.find_or_insert(call.ids, call.offsets, call.tables)
    assert rows_of(handles) == [0, 1, 1, 2]


def test_last_freed_row_is_taken_first_with_the_next_generation() -> None:
    group = make_group()
    group.insert(0, torch.arange(5))
    assert group.erase(0, tensor([1, 3, 1, 99])) == 2
    handles = group.insert(0, tensor([10, 11, 12]))
    assert rows_of(handles) == [3, 1, 5]
    assert generations_of(handles) == [2, 2, 1]
    assert group.erase(0, tensor([10])) == 1
    again = group.insert(0, tensor([3]))
    assert (rows_of(again), generations_of(again)) == ([3], [3])
    assert group.index.tables[0, Table.INSERTED] == 9
    assert group.index.tables[0, Table.ERASED] == 3


def test_freed_row_goes_to_any_table_of_its_dim() -> None:
    group = make_group((4, 4))
    group.insert(0, tensor([1]))
    group.erase(0, tensor([1]))
    assert rows_of(group.insert(1, tensor([1]))) == [0]
    assert not group.contains(0, tensor([1])).item()


def test_generation_wraps_past_never_written() -> None:
    """Generation 0 marks rows that nothing has written, so no owner gets it."""
    group = make_group()
    group.insert(0, tensor([1]))
    group.erase(0, tensor([1]))
    group.index.free_rows[0, 0] = (1 << 28) - 1  # row 0, the last generation
    last = group.insert(0, tensor([1]))
    assert generations_of(last) == [(1 << 28) - 1]
    train(group, 0, tensor([1]), torch.ones(1, 4))
    group.erase(0, tensor([1]))
    first = group.insert(0, tensor([2]))
    assert (rows_of(first), generations_of(first)) == ([0], [1])
    assert torch.equal(group.read(0, tensor([2])), make_group().read(0, tensor([2])))


@pytest.mark.parametrize(
    "optimizer",
    [
        td.Adagrad(lr=0.1, initial_accumulator_value=0.25),
        td.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.25),
        td.Adam(lr=0.1),
    ],
    ids=lambda optimizer: optimizer.kernel_name,
)
def test_reused_row_starts_clean(optimizer: Any) -> None:
    used, fresh = make_group(optimizer=optimizer), make_group(optimizer=optimizer)
    for _ in range(3):
        train(used, 0, tensor([1]), torch.full((1, 4), 5.0))
    used.erase(0, tensor([1]))
    assert rows_of(used.insert(0, tensor([2]))) == [0]
    assert torch.equal(used.read(0, tensor([2])), fresh.read(0, tensor([2])))
    used.rows.row_clock.zero_()
    for group in (used, fresh):
        train(group, 0, tensor([2]), torch.ones(1, 4))
    assert torch.equal(used.rows.weights[0][0], fresh.rows.weights[0][0])
    assert [s[0].tolist() for s in used.rows.state] == [s[0].tolist() for s in fresh.rows.state]


def test_write_touches_no_other_row_and_starts_state_afresh() -> None:
    group = make_group(optimizer=td.Adagrad(lr=0.1, initial_accumulator_value=0.5))
    train(group, 0, torch.arange(4), torch.ones(4, 4))
    group.insert(0, torch.arange(4, 8))
    group.erase(0, tensor([3]))
    values = torch.arange(16.0).reshape(4, 4)
    group.insert_or_assign(
        0, tensor([2, 5, 100, 101]), values
    )  # trained, unwritten, a reused row, a new one
    assert torch.equal(group.read(0, tensor([2, 5, 100, 101])), values)
    assert torch.equal(group.read(0, tensor([4])), make_group().read(0, tensor([4])))
    assert group.materialize() == 3  # ids 4, 6, 7
    rows = rows_of(group.insert(0, tensor([2, 5, 100, 101])))
    sums = group.rows.state[0][rows, 0].tolist()
    assert sums == [1.5, 0.5, 0.5, 0.5]


def test_materialize_writes_each_unwritten_row_once() -> None:
    optimizer = td.Adagrad(lr=0.1, initial_accumulator_value=0.25)
    group = make_group((3, 5), optimizer=optimizer)
    group.insert(0, torch.arange(10))
    group.insert(1, torch.arange(6))
    train(group, 1, torch.arange(4), torch.ones(4, 5))
    expected = [group.read(0, torch.arange(10)), group.read(1, torch.arange(6))]
    assert group.materialize() == 12
    assert group.materialize() == 0
    assert torch.equal(group.rows.weights[0][:10], expected[0])
    assert torch.equal(group.rows.weights[1][:6], expected[1])
    assert torch.equal(group.rows.state[0][:10], torch.full((10, 3), 0.25))
    assert torch.equal(group.rows.state[1][4:6], torch.full((2, 5), 0.25))
    group.erase(0, tensor([4]))
    group.insert(0, tensor([40]))
    assert group.materialize() == 1
    assert torch.equal(group.rows.weights[0][4], group.read(0, tensor([40]))[0])


# -- which ids -----------------------------------------------------------------------------------


def test_every_int64_is_an_id() -> None:
    group = make_group()
    ids = tensor(EXTREMES)
    assert group.find(ids, tensor([0, 7]), [0]).handles.tolist() == [-1] * 7
    assert rows_of(group.insert(0, ids)) == list(range(7))
    assert rows_of(group.find(ids, tensor([0, 7]), [0]).handles) == list(range(7))
    for id in EXTREMES:
        assert group.erase(0, tensor([id])) == 1
        assert not group.contains(0, tensor([id])).item()
    assert group.size(0) == 0
    assert rows_of(group.insert(0, ids)) == list(reversed(range(7)))


def test_empty_call_changes_nothing() -> None:
    group = make_group((4, 8))
    before = snapshot(group)
    none = tensor([])
    assert group.insert(0, none).shape == (0,)
    assert group.find_or_insert(none, tensor([0]), [0, 1]).shape == (0,)  # a batch of 0
    assert group.find_or_insert(none, tensor([0, 0, 0]), [0, 1]).shape == (0,)  # empty bags
    assert group.erase(0, none) == 0
    assert group.find(none, tensor([0, 0]), [1]).missing.tolist() == [0, 0]
    assert list(group.export(0)) == []
    assert differences(before, snapshot(group)) == []


def test_padding_id_is_never_inserted() -> None:
    group = make_group((4, 4), padding_idx=0)
    handles = group.insert(0, tensor([0, 5, 0]))
    assert handles.tolist() == [-2, 1, -2]
    found = group.find(tensor([0, 5, 6]), tensor([0, 3]), [0])
    assert found.handles.tolist() == [-2, 1, -1]
    assert found.missing.tolist() == [1, 0]
    assert group.erase(0, tensor([0])) == 0
    assert group.size(0) == 1
    assert rows_of(group.insert(1, tensor([0]))) == [1]  # the other table has no padding id


def test_missing_ids_are_counted_by_table() -> None:
    group = make_group((4, 8, 4))
    group.insert(1, tensor([1, 2]))
    call = call_of(group, [(1, [[1, 2], [3]]), (0, [[1], [1]]), (1, [[4], []])])
    found = group.find(call.ids, call.offsets, call.tables)
    assert found.missing.tolist() == [2, 2, 0]
    assert (found.handles >= 0).tolist() == [True, True, False, False, False, False]


def test_strided_ids() -> None:
    group = make_group()
    ids = torch.arange(20).reshape(10, 2)
    assert rows_of(group.insert(0, ids[:, 1])) == list(range(10))
    assert group.contains(0, ids).tolist() == [[False, True]] * 10
    assert group.read(0, ids[:, 0]).shape == (10, 4)
    assert group.erase(0, ids[::2, 1]) == 5


def test_score_is_the_clock_of_the_last_call() -> None:
    group = make_group(score="step")
    for step, ids in enumerate(([1, 2, 3], [2], [3, 4])):
        group.index.clock[0].fill_(step)
        group.insert(0, tensor(ids))
    group.index.clock[0].fill_(9)
    group.find(tensor([1]), tensor([0, 1]), [0])  # reading leaves scores alone
    scores = {}
    for batch in group.export(0):
        scores.update(zip(batch.ids.tolist(), batch.scores.tolist(), strict=True))
    assert scores == {1: 0, 2: 1, 3: 2, 4: 2}


# -- collisions ----------------------------------------------------------------------------------


def test_constructed_ids_do_collide() -> None:
    group = make_group()
    first = first_hashes(group, 0, ids_in_first_buckets(group, 0, 50, buckets=2, bucket_count=64))
    assert set(bucket_of_hashes(first, 64).tolist()) == {0, 1}
    both = first_hashes(group, 0, ids_in_one_bucket(group, 0, 50, bucket_count=64))
    for bucket_count in (8, 16, 64):
        assert not bucket_of_hashes(both, bucket_count).any()
        assert not bucket_of_hashes(second_hash(both), bucket_count).any()
    group.insert(0, torch.cat([torch.arange(5), tensor([-9])]))
    buckets = bucket_of_hashes(first_hashes(group, 0, tensor([3, -9])), FIRST_BUCKETS)
    for id, bucket in zip([3, -9], buckets.tolist(), strict=True):
        assert id in group.index.buckets[bucket, :BUCKET_WIDTH].tolist()


def colliding(group: td.TableGroup, kind: str, count: int) -> Tensor:
    if kind == "first bucket":
        return ids_in_first_buckets(group, 0, count, buckets=1, bucket_count=1 << 30)
    if kind == "both buckets":
        return ids_in_one_bucket(group, 0, count, bucket_count=64)
    ids = ids_in_first_buckets(group, 0, 4 * count, buckets=1, bucket_count=FIRST_BUCKETS)
    # second candidate in the last bucket, so that the probe goes round the end
    seconds = bucket_of_hashes(second_hash(first_hashes(group, 0, ids)), FIRST_BUCKETS)
    return ids[torch.tensor(seconds == FIRST_BUCKETS - 1)]


@pytest.mark.parametrize("kind", ["first bucket", "both buckets", "last bucket"])
@pytest.mark.parametrize("at_once", [True, False])
def test_ids_of_one_bucket(kind: str, at_once: bool) -> None:
    group = make_group()
    ids = colliding(group, kind, 200)[:400]
    for part in [ids] if at_once else ids.split(1):
        group.insert(0, part)
    assert rows_of(group.find(ids, tensor([0, len(ids)]), [0]).handles) == list(range(len(ids)))
    assert group.size(0) == len(ids)
    assert not group.contains(0, torch.arange(500)).any()
    gone, left = ids[::3], torch.cat([ids[1::3], ids[2::3]])
    assert group.erase(0, gone) == len(gone)
    assert not group.contains(0, gone).any()
    assert group.contains(0, left).all()
    group.insert(0, gone)
    assert group.contains(0, ids).all()
    assert sorted(id for batch in group.export(0) for id in batch.ids.tolist()) == sorted(
        ids.tolist()
    )


def test_probe_goes_past_erased_ids() -> None:
    """Erasing from a full bucket leaves tombstones; the ids displaced by it stay reachable."""
    group = make_group()
    ids = ids_in_one_bucket(group, 0, 3 * BUCKET_WIDTH, bucket_count=64)
    group.insert(0, ids)
    group.erase(0, ids[:BUCKET_WIDTH])
    assert group.index.tables[0, Table.TOMBSTONES] > 0
    assert group.contains(0, ids[BUCKET_WIDTH:]).all()
    assert not group.contains(0, ids[:BUCKET_WIDTH]).any()
    group.insert(0, ids[:BUCKET_WIDTH])
    assert group.index.tables[0, Table.TOMBSTONES] == 0


def test_tombstone_of_id_zero() -> None:
    """Key 0 marks empty slots, so the tombstone of id 0 takes another key, that of no id there."""
    group = make_group()
    pool = torch.arange(2, 4000)
    buckets = bucket_of_hashes(first_hashes(group, 0, pool), FIRST_BUCKETS)
    own = bucket_of_hashes(first_hashes(group, 0, tensor([0])), FIRST_BUCKETS)
    neighbours = pool[torch.tensor(buckets == own)][: 2 * BUCKET_WIDTH]
    group.insert(0, torch.cat([tensor([0]), neighbours]))
    assert group.erase(0, tensor([0])) == 1
    assert group.index.tables[0, Table.TOMBSTONES] == 1
    assert not group.contains(0, tensor([0, 1])).any()
    assert group.contains(0, neighbours).all()
    group.insert(0, tensor([0]))
    assert group.index.tables[0, Table.TOMBSTONES] == 0
    assert group.contains(0, torch.cat([tensor([0]), neighbours])).all()


def test_churn_stays_within_its_buckets() -> None:
    """Tombstones are cleared without growth: the table never holds more than 30 ids."""
    group = make_group()
    buckets = int(group.index.tables[0, Table.BUCKET_COUNT])
    for first in range(0, 6000, 10):
        group.insert(0, torch.arange(first, first + 30))
        group.erase(0, torch.arange(first, first + 10))
    assert group.index.tables[0, Table.BUCKET_COUNT] == buckets
    assert group.index.tables[0, Table.GROWTHS] > 0
    assert group.contains(0, torch.arange(6000, 6020)).all()
    assert group.size(0) == 20
    assert group.index.slabs[0, Slab.NEXT_ROW] <= 40


# -- full ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [1, 7, 5000])
def test_full_table_raises_and_stays_usable(extra: int) -> None:
    group = make_group(max_rows=100)
    train(group, 0, torch.arange(100), torch.ones(100, 4))
    rows = group.read(0, torch.arange(100))
    with_some_known = torch.arange(90, 100 + extra)
    assert unchanged(group, lambda: group.insert(0, with_some_known)) == []
    with raises_in_step(group, "create the table with a larger max_rows, or erase"):
        group.insert(0, with_some_known)
    assert torch.equal(group.read(0, torch.arange(100)), rows)
    assert group.insert(0, torch.arange(100)).numel() == 100
    assert group.erase(0, torch.arange(10)) == 10
    assert rows_of(group.insert(0, torch.arange(200, 210))) == list(reversed(range(10)))
    assert unchanged(group, lambda: group.insert(0, tensor([300]))) == []


def test_full_slab_leaves_the_other_tables_of_the_call_alone() -> None:
    group = make_group((4, 8, 4), max_rows=100)
    group.insert(0, torch.arange(60))
    call = call_of(group, [(1, [list(range(50))]), (2, [list(range(41))])])
    assert unchanged(group, lambda: group.find_or_insert(call.ids, call.offsets, call.tables)) == []
    assert group.sizes() == {"t0": 60, "t1": 0, "t2": 0}
    call = call_of(group, [(1, [list(range(50))]), (2, [list(range(40))])])
    group.find_or_insert(call.ids, call.offsets, call.tables)
    assert group.sizes() == {"t0": 60, "t1": 50, "t2": 40}


def test_index_takes_every_row_that_is_reserved() -> None:
    group = make_group(max_rows=777)
    for id in range(777):
        group.insert(0, tensor([id]))
    assert group.contains(0, torch.arange(777)).all()
    slots = int(group.index.tables[0, Table.BUCKET_COUNT]) * BUCKET_WIDTH
    assert slots * MAX_LOAD_PERCENT / 100 >= 777


def test_reserve_beyond_max_rows_raises() -> None:
    group = make_group(max_rows=100)
    assert unchanged(group, lambda: group.reserve(0, 100_000)) == []
    with pytest.raises(RuntimeError, match=r"larger max_rows"):
        group.reserve(0, 100_000)


# -- reserve and export --------------------------------------------------------------------------


def test_reserve_makes_room_once() -> None:
    group = make_group(max_rows=5000)
    group.insert(0, torch.arange(20))
    group.reserve(0, 5000)
    assert group.index.tables[0, Table.GROWTHS] == 1
    group.reserve(0, 5000)
    group.reserve(0, 10)
    group.insert(0, torch.arange(5000))
    assert group.index.tables[0, Table.GROWTHS] == 1
    assert rows_of(group.insert(0, torch.arange(20))) == list(range(20))


@pytest.mark.parametrize("batch_size", [BUCKET_WIDTH, 100, 1 << 20])
def test_export_gives_everything_once(batch_size: int) -> None:
    group = make_group((4, 3), optimizer=td.Adam(lr=0.1))
    train(group, 1, torch.arange(100), torch.ones(100, 3))
    group.insert(1, torch.arange(100, 300))
    group.insert(0, torch.arange(50))
    batches = list(group.export(1, batch_size=batch_size))
    assert all(0 < len(batch.ids) <= batch_size for batch in batches)
    ids = torch.cat([batch.ids for batch in batches])
    assert sorted(ids.tolist()) == list(range(300))
    assert torch.equal(torch.cat([batch.rows for batch in batches]), group.read(1, ids))


def test_memory_counts_what_is_used() -> None:
    group = make_group((4, 8), optimizer=td.Adam(lr=0.1), score="step")
    group.insert(0, torch.arange(30))
    group.insert(1, torch.arange(20))
    group.erase(0, torch.arange(5))
    memory = group.usage.memory()
    assert memory["rows"] == 30 * (16 + 4) + 20 * (32 + 4)
    assert memory["state"] == 2 * (30 * 16 + 20 * 32)
    slots = int(group.index.tables[:, Table.BUCKET_COUNT].sum()) * BUCKET_WIDTH
    assert memory["index"] == 24 * slots + 5 * 8
    assert memory["total"] == memory["rows"] + memory["state"] + memory["index"]
