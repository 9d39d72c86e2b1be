"""Tables whose rows lie in a store, against the same tables with all rows in memory."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from dict_store import DictStore, put_in_store
from hypothesis import given, settings
from hypothesis import strategies as st
from seeding import seeded
from torch import Tensor
from whole_group import check_owners

import torch_dynemb as td
from torch_dynemb.ops.columns import Slab
from torch_dynemb.table import extension
from torch_dynemb.table.content import read_content, score_names, write_content
from torch_dynemb.table.row_access import read_rows, readable, write_rows
from torch_dynemb.table.tables import Tables

pytestmark = pytest.mark.cpu_only("stores are read by the CPU")

DIM = 6
PLAIN = td.Policy()
OPTIMIZERS: list[Any] = [
    td.SGD(lr=0.1),
    td.Adam(lr=0.1, row_steps=True, state_dtype=torch.bfloat16),
    td.Adam(lr=0.1, state_dtype=torch.uint8),
    td.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.5),
]


def make_group(
    optimizer: Any, dtype: torch.dtype = torch.float32, policy: td.Policy = PLAIN
) -> td.TableGroup:
    """Two tables of a slab, and one of another."""
    tables = [
        td.TableConfig("a", DIM, dtype=dtype, policy=policy, initializer=td.Uniform(-1, 1)),
        td.TableConfig("b", DIM, dtype=dtype, initializer=td.Uniform(-1, 1)),
        td.TableConfig("c", 3, initializer=td.Constant(0.5)),
    ]
    return td.TableGroup(tables, optimizer=optimizer, max_rows=300, seed=3)


def pair(
    optimizer: Any,
    dtype: torch.dtype = torch.float32,
    policy: td.Policy = PLAIN,
    slabs: list[int] | None = None,
) -> tuple[td.TableGroup, td.TableGroup, DictStore]:
    """The same tables in memory, and in a store."""
    plain, stored = (make_group(optimizer, dtype, policy) for _ in range(2))
    return plain, stored, put_in_store(stored, slabs)


def rows_of(table: int, count: int, seed: int) -> Tensor:
    return torch.randn(count, 3 if table == 2 else DIM, generator=seeded(seed))


def give_state(tables: Tables, table: int, ids: Tensor, seed: int) -> None:
    """Rows as a training step leaves them: written, with state."""
    handles = td.ops.find(tables.index, ids, torch.tensor([0, ids.numel()]), [table]).handles
    ids, handles = ids[handles >= 0], handles[handles >= 0]
    before = read_rows(tables, table, ids, handles)
    generator = seeded(seed)
    state = {}
    for name, values in before.state.items():
        drawn = torch.randint(0, 100, values.shape, generator=generator)
        state[name] = drawn.to(values.dtype)
    weights = torch.randn(before.weights.shape, generator=generator).to(before.weights.dtype)
    write_rows(tables, table, ids, handles, weights, state)


def check_equal(plain: td.TableGroup, stored: td.TableGroup) -> None:
    everyone = torch.arange(-2, 70)
    assert plain.sizes() == stored.sizes()
    check_owners(stored)
    for table in range(3):
        assert torch.equal(plain.read(table, everyone), stored.read(table, everyone))
        one, other = (read_content(group.tables, table) for group in (plain, stored))
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.rows, other.rows)
        assert torch.equal(one.scores, other.scores)
        assert one.state.keys() == other.state.keys()
        for name, values in one.state.items():
            assert torch.equal(values, other.state[name]), name
        batches = [list(group.export(table, batch_size=16)) for group in (plain, stored)]
        for mine, theirs in zip(*batches, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert torch.equal(a, b)


IDS = st.lists(st.integers(0, 59), min_size=1, max_size=25, unique=True)
TABLE = st.integers(0, 2)
SEED = st.integers(0, 1000)
STEPS = st.one_of(
    st.tuples(st.just("assign"), TABLE, IDS, SEED),
    st.tuples(st.just("insert"), TABLE, IDS, SEED),
    st.tuples(st.just("train"), TABLE, IDS, SEED),
    st.tuples(st.just("erase"), TABLE, IDS, SEED),
    st.tuples(st.just("fill"), TABLE, IDS, SEED),
    st.tuples(st.just("norm"), TABLE, IDS, SEED),
    st.tuples(st.just("predicate"), TABLE, IDS, SEED),
    st.tuples(st.just("clear"), TABLE, IDS, SEED),
    st.tuples(st.just("materialize"), TABLE, IDS, SEED),
    st.tuples(st.just("compact"), TABLE, IDS, SEED),
    st.tuples(st.just("content"), TABLE, IDS, SEED),
)


def do(group: td.TableGroup, what: str, table: int, ids: Tensor, seed: int) -> object:
    if what == "assign":
        group.insert_or_assign(table, ids, rows_of(table, ids.numel(), seed))
    elif what == "insert":
        return (group.insert(table, ids) >= 0).tolist()
    elif what == "train":
        give_state(group.tables, table, ids, seed)
    elif what == "erase":
        return group.erase(table, ids)
    elif what == "fill":
        group.fill(table, seed / 7)
    elif what == "norm":
        return group.remove(table, norm_below=1 + seed / 500)
    elif what == "predicate":
        return group.remove(table, predicate=lambda found, _: found % 5 == seed % 5)
    elif what == "clear":
        return group.clear(table)
    elif what == "materialize":
        group.materialize()
    elif what == "compact":
        group.compact()
    elif what == "content":  # what loads of sharded states do
        content = read_content(group.tables, table)
        names = score_names(group.tables, table)
        write_content(group.tables, table, content, None, names)
    group.step()
    return None


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=14),
    optimizer=st.sampled_from(OPTIMIZERS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    capacity=st.sampled_from([None, 20]),
    slabs=st.sampled_from([None, [0], [1]]),
)
def test_any_sequence_gives_the_rows_of_tables_in_memory(
    steps: list[tuple[str, int, list[int], int]],
    optimizer: Any,
    dtype: torch.dtype,
    capacity: int | None,
    slabs: list[int] | None,
) -> None:
    policy = PLAIN if capacity is None else td.Policy(score="step", capacity=capacity)
    plain, stored, _ = pair(optimizer, dtype, policy, slabs)
    for group in (plain, stored):
        group.record_evicted(1000, rows=True)
    for what, table, ids, seed in steps:
        given_ids = torch.tensor(ids)
        assert do(plain, what, table, given_ids, seed) == do(stored, what, table, given_ids, seed)
    check_equal(plain, stored)
    mine, theirs = plain.take_evicted(), stored.take_evicted()
    assert mine.keys() == theirs.keys()
    for name, evicted in mine.items():
        other = theirs[name]
        assert torch.equal(evicted.ids, other.ids)
        assert evicted.rows is not None
        assert other.rows is not None
        assert torch.equal(evicted.rows, other.rows)


def test_ids_without_rows_read_as_in_memory() -> None:
    plain, stored, _ = pair(td.Adam(lr=0.1))
    known = torch.arange(3)
    for group in (plain, stored):
        group.insert_or_assign(0, known, rows_of(0, 3, 1))
        group.insert(0, torch.tensor([7]))
    for ids in (torch.tensor([90, 1, 7, 91, 1]), torch.tensor([90]), torch.empty(0).long()):
        assert torch.equal(plain.read(0, ids), stored.read(0, ids))
    ids = torch.tensor([90, 1, 7])
    handles = stored.find(ids, torch.tensor([0, 3]), [0]).handles
    rows, local = readable(stored.tables, 0, ids, handles)
    assert local[0] == handles[0] < 0
    assert rows.weights[0] is stored.rows.weights[0]  # of the other slab: in order of dims
    assert rows.weights[1].shape == (2, DIM)


def test_a_store_is_read_and_written_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_dynemb.table.row_access._PIECE_BYTES", 1000)
    plain, stored, store = pair(td.Adam(lr=0.1))
    ids = torch.arange(60)
    for group in (plain, stored):
        group.insert_or_assign(0, ids, rows_of(0, 60, 1))
    store.most_read = 0
    check_equal(plain, stored)
    assert 0 < store.most_read <= 10  # of 24 + 3 * 4 * 6 bytes and more


def test_a_disk_without_room_takes_new_ids_back_and_leaves_the_others() -> None:
    _, stored, store = pair(td.Adam(lr=0.1))
    stored.insert_or_assign(0, torch.arange(10), rows_of(0, 10, 1))
    before = stored.read(0, torch.arange(20))
    store.room = 5
    with pytest.raises(RuntimeError, match="no room on the disk"):
        stored.insert_or_assign(0, torch.arange(5, 15), rows_of(0, 10, 2))
    assert stored.size(0) == 10
    assert torch.equal(stored.read(0, torch.arange(20)), before)
    store.room = 100
    stored.insert_or_assign(0, torch.arange(5, 15), rows_of(0, 10, 2))
    assert torch.equal(stored.read(0, torch.arange(5, 15)), rows_of(0, 10, 2))


def test_compaction_leaves_rows_where_they_are_and_empty_slabs_begin_anew() -> None:
    _, stored, _ = pair(td.SGD(lr=0.1))
    stored.insert_or_assign(0, torch.arange(40), rows_of(0, 40, 1))
    stored.erase(0, torch.arange(30))
    handles = stored.find(torch.arange(30, 40), torch.tensor([0, 10]), [0]).handles
    stored.compact()
    again = stored.find(torch.arange(30, 40), torch.tensor([0, 10]), [0]).handles
    assert torch.equal(handles, again)
    stored.clear(0)
    stored.compact()
    assert stored.index.slabs[1, [Slab.NEXT_ROW, Slab.FREE_COUNT]].tolist() == [0, 0]
    stored.insert(0, torch.arange(20))  # in rows that others had
    twin = make_group(td.SGD(lr=0.1))
    twin.insert(0, torch.arange(20))
    assert torch.equal(stored.read(0, torch.arange(20)), twin.read(0, torch.arange(20)))


def test_memory_counts_rows_in_memory() -> None:
    plain, stored, store = pair(td.Adam(lr=0.1), slabs=[1])
    for group in (plain, stored):
        group.insert_or_assign(0, torch.arange(50), rows_of(0, 50, 1))
        group.insert_or_assign(2, torch.arange(20), rows_of(2, 20, 1))
    assert stored.memory()["rows"] == store.rows_in_memory(1) * (4 * DIM + 4) + 20 * (4 * 3 + 4)
    assert stored.memory()["state"] == store.rows_in_memory(1) * 8 * DIM + 20 * 8 * 3
    assert plain.memory()["rows"] == 50 * (4 * DIM + 4) + 20 * (4 * 3 + 4)


REFUSED = {
    "state_dict": lambda group: group.state_tensors(),
    "load_state_dict": lambda group: group.load_state_tensors({}),
    "pickle, copy.deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "add_table": lambda group: group.add_table(td.TableConfig("d", 4)),
    "to": lambda group: extension.move(group.tables, group.tables.memory),
    "set_optimizer": lambda group: group.set_optimizer(td.Adam(lr=0.1)),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_needs_all_rows_in_memory_is_refused(call: str) -> None:
    plain, stored, _ = pair(td.SGD(lr=0.1))
    for group in (plain, stored):
        group.insert_or_assign(0, torch.arange(9), rows_of(0, 9, 1))
    tables = stored.tables
    with pytest.raises(RuntimeError, match=rf"^{call}.*\['a', 'b', 'c'\].*checkpoint") as error:
        REFUSED[call](stored)
    assert "torch_dynemb.checkpoint." in str(error.value)
    assert stored.tables is tables
    check_equal(plain, stored)


def test_tables_of_another_slab_are_named() -> None:
    _, stored, _ = pair(td.SGD(lr=0.1), slabs=[0])
    with pytest.raises(RuntimeError, match=r"the rows of \['c'\] lie in a store"):
        stored.state_tensors()
