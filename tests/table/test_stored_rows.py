"""Tables with rows in a store, against the same tables with all rows in memory."""

from __future__ import annotations

import copy
import pickle
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_content import score_words, write_content
from record_dict import LEAST, RecordDict, stored
from seeding import seeded
from torch import Tensor
from whole_group import check_owners

import torch_dynemb as td
from torch_dynemb.ops.columns import GENERATION_BITS, Slab
from torch_dynemb.storage.tiers import Storage
from torch_dynemb.table import extension
from torch_dynemb.table.content import read_content
from torch_dynemb.table.row_access import readable

pytestmark = pytest.mark.cpu_only("stores are read by the CPU")

DIM = 6
PLAIN = td.Policy()
OPTIMIZERS: list[Any] = [
    td.SGD(lr=0.1),
    td.Adam(lr=0.1, row_steps=True, state_dtype=torch.bfloat16),
    td.Adam(lr=0.1, state_dtype=torch.uint8),
    td.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.5),
]


def make_module(
    optimizer: Any,
    dtype: torch.dtype = torch.float32,
    policy: td.Policy = PLAIN,
    stored_tables: str = "",
    where: Storage | None = None,
) -> td.DynamicEmbeddingBagCollection:
    """Two tables of a dim, and one of another."""
    storage = dict.fromkeys(stored_tables, where)
    tables = [
        td.TableConfig(
            name,
            dim,
            dtype=dtype if name != "c" else torch.float32,
            policy=policy if name == "a" else PLAIN,
            initializer=td.Uniform(-1, 1),
            storage=storage.get(name),
        )
        for name, dim in (("a", DIM), ("b", DIM), ("c", 3))
    ]
    torch.manual_seed(3)
    return td.DynamicEmbeddingBagCollection(tables, optimizer=optimizer, max_rows=300)


def pair_of_groups(
    optimizer: Any, stored_tables: str = "abc"
) -> tuple[td.TableGroup, td.TableGroup, RecordDict]:
    """The same tables in memory, and in a store."""
    store = RecordDict()
    plain = make_module(optimizer)
    other = make_module(optimizer, stored_tables=stored_tables, where=stored(store))
    for module in (plain, other):
        module.group.owner = None  # the module is not used any more
    return plain.group, other.group, store


def rows_of(table: int, count: int, seed: int) -> Tensor:
    return torch.randn(count, 3 if table == 2 else DIM, generator=seeded(seed))


def look_up(
    module: td.DynamicEmbeddingBagCollection, table: int, ids: Tensor, seed: int, *, train: bool
) -> Tensor:
    """What a step, or a lookup between steps, gives."""
    module.train(train)
    batch = {name: torch.empty(ids.numel(), 0, dtype=torch.int64) for name in "abc"}
    batch["abc"[table]] = ids[:, None]
    found = module(batch)
    if train:
        (found * torch.randn(found.shape, generator=seeded(seed))).sum().backward()
    return found.detach()


def check_equal(plain: td.TableGroup, stored: td.TableGroup) -> None:
    everyone = torch.arange(-2, 110)
    assert plain.sizes() == stored.sizes()
    check_owners(stored)
    for table in range(3):
        assert torch.equal(plain.read(table, everyone), stored.read(table, everyone))
        one, other = (read_content(group.tables, table) for group in (plain, stored))
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.rows, other.rows)
        assert torch.equal(score_words(one), score_words(other))
        assert one.state.keys() == other.state.keys()
        for name, values in one.state.items():
            assert torch.equal(values, other.state[name]), name
        batches = [list(group.export(table, batch_size=16)) for group in (plain, stored)]
        for mine, theirs in zip(*batches, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert torch.equal(a, b)


IDS = st.lists(st.integers(0, 99), min_size=1, max_size=40, unique=True)
CALLS = (
    "assign train train train look insert erase fill norm slices predicate clear materialize "
    "compact content"
)
STEPS = st.tuples(
    st.sampled_from(CALLS.split()), st.integers(0, 2), IDS, st.integers(0, 1000), st.booleans()
)


def do(
    module: td.DynamicEmbeddingBagCollection, what: str, table: int, ids: Tensor, seed: int
) -> object:
    group = module.group
    if what in ("train", "look"):
        return look_up(module, table, ids, seed, train=what == "train").tolist()
    if what == "assign":
        try:
            group.insert_or_assign(table, ids, rows_of(table, ids.numel(), seed))
        except RuntimeError as error:
            return str(error)  # too little room for all ids
    elif what == "insert":
        return (group.insert(table, ids) >= 0).tolist()
    elif what == "erase":
        return group.erase(table, ids)
    elif what == "fill":
        group.fill(table, seed / 7)
    elif what == "norm":
        return group.remove(table, norm_below=1 + seed / 500)
    elif what == "slices":
        return list(group.remove_in_slices(table, norm_below=1 + seed / 500, batch_size=16))
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
        write_content(group.tables, table, content, None)
    return None


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=14),
    optimizer=st.sampled_from(OPTIMIZERS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    capacity=st.sampled_from([None, 35]),
    stored_tables=st.sampled_from(["abc", "a", "bc"]),
    on_disk=st.booleans(),
)
def test_any_sequence_gives_the_rows_of_tables_in_memory(
    steps: list[tuple[str, int, list[int], int, bool]],
    optimizer: Any,
    dtype: torch.dtype,
    capacity: int | None,
    stored_tables: str,
    on_disk: bool,
) -> None:
    policy = PLAIN if capacity is None else td.Policy(score="step", capacity=capacity)
    with tempfile.TemporaryDirectory() as folder:
        where = td.SSDStore(folder, cache=LEAST, segment=1 << 16) if on_disk else stored()
        plain = make_module(optimizer, dtype, policy)
        other = make_module(optimizer, dtype, policy, stored_tables, where)
        for module in (plain, other):
            module.group.evicted.record(1000, rows=True)
        for what, table, ids, seed, ends in steps:
            given_ids = torch.tensor(ids)
            assert do(plain, what, table, given_ids, seed) == do(
                other, what, table, given_ids, seed
            )
            for module in (plain, other) if ends else ():
                module.optimizer.step()
        check_equal(plain.group, other.group)
        mine, theirs = plain.group.evicted.take(), other.group.evicted.take()
        assert mine.keys() == theirs.keys()
        for name, evicted in mine.items():
            assert torch.equal(evicted.ids, theirs[name].ids)
            assert evicted.rows is not None
            assert theirs[name].rows is not None
            assert torch.equal(evicted.rows, theirs[name].rows)


def test_ids_without_rows_read_as_in_memory() -> None:
    plain, group, _ = pair_of_groups(td.Adam(lr=0.1))
    known = torch.arange(3)
    for of in (plain, group):
        of.insert_or_assign(0, known, rows_of(0, 3, 1))
        of.insert(0, torch.tensor([7]))
    for ids in (torch.tensor([90, 1, 7, 91, 1]), torch.tensor([90]), torch.empty(0).long()):
        assert torch.equal(plain.read(0, ids), group.read(0, ids))
    ids = torch.tensor([90, 1, 7])
    handles = group.find(ids, torch.tensor([0, 3]), [0]).handles
    rows, local = readable(group.tables, 0, ids, handles)
    assert local[0] == handles[0] < 0
    assert rows.weights[0] is group.rows.weights[0]  # of the other slab: in order of dims
    assert rows.weights[1].shape == (2, DIM)


def test_a_store_is_read_and_written_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_dynemb.table.row_access._PIECE_BYTES", 1000)
    plain, group, store = pair_of_groups(td.Adam(lr=0.1))
    ids = torch.arange(60)
    for of in (plain, group):
        of.insert_or_assign(0, ids, rows_of(0, 60, 1))
    store.most_read = 0
    check_equal(plain, group)
    assert 0 < store.most_read <= 10  # of 24 + 3 * 4 * 6 bytes and more


def test_a_disk_without_room_takes_new_ids_back_and_leaves_the_others() -> None:
    _, group, store = pair_of_groups(td.Adam(lr=0.1))
    group.insert_or_assign(0, torch.arange(10), rows_of(0, 10, 1))
    before = group.read(0, torch.arange(20))
    store.room = 5
    with pytest.raises(RuntimeError, match="no room on the disk"):
        group.insert_or_assign(0, torch.arange(5, 15), rows_of(0, 10, 2))
    assert group.size(0) == 10
    assert torch.equal(group.read(0, torch.arange(20)), before)
    store.room = 100
    group.insert_or_assign(0, torch.arange(5, 15), rows_of(0, 10, 2))
    assert torch.equal(group.read(0, torch.arange(5, 15)), rows_of(0, 10, 2))


def test_an_earlier_row_of_an_id_does_not_replace_the_present_one() -> None:
    """It is still in the cache when the id is given another row, and leaves the cache later."""
    store = RecordDict()
    module = make_module(td.SGD(lr=0.1), stored_tables="abc", where=stored(store))

    def train(ids: range) -> None:
        look_up(module, 0, torch.tensor(ids), 1, train=True)
        module.optimizer.step()

    group, one = module.group, torch.tensor([1])
    for ids in (range(50, 110), range(50)):
        train(ids)
    before = group.find(one, torch.tensor([0, 1]), [0]).handles
    group.erase(0, torch.tensor([1, 2]))
    assert not {1, 2} & store.records["a"].keys()
    group.insert_or_assign(0, one, torch.ones(1, DIM))
    after = group.find(one, torch.tensor([0, 1]), [0]).handles
    assert after >> GENERATION_BITS != before >> GENERATION_BITS
    for _ in range(8):
        for ids in (range(50, 80), range(80, 110)):
            train(ids)
    assert torch.equal(group.read(0, one), torch.ones(1, DIM))


def test_compaction_leaves_rows_where_they_are_and_empty_slabs_begin_anew() -> None:
    _, group, _ = pair_of_groups(td.SGD(lr=0.1))
    group.insert_or_assign(0, torch.arange(40), rows_of(0, 40, 1))
    group.erase(0, torch.arange(30))
    handles = group.find(torch.arange(30, 40), torch.tensor([0, 10]), [0]).handles
    group.compact()
    again = group.find(torch.arange(30, 40), torch.tensor([0, 10]), [0]).handles
    assert torch.equal(handles, again)
    group.clear(0)
    group.compact()
    assert group.index.slabs[1, [Slab.NEXT_ROW, Slab.FREE_COUNT]].tolist() == [0, 0]
    group.insert(0, torch.arange(20))  # in rows that others had
    twin = make_module(td.SGD(lr=0.1)).group
    twin.insert(0, torch.arange(20))
    assert torch.equal(group.read(0, torch.arange(20)), twin.read(0, torch.arange(20)))


def test_memory_counts_rows_that_have_slots() -> None:
    plain, group, _ = pair_of_groups(td.Adam(lr=0.1), "ab")
    for of in (plain, group):
        of.insert_or_assign(0, torch.arange(50), rows_of(0, 50, 1))
        of.insert_or_assign(2, torch.arange(20), rows_of(2, 20, 1))
    assert plain.usage.memory()["rows"] == 50 * (4 * DIM + 4) + 20 * (4 * 3 + 4)
    assert group.usage.memory()["rows"] == 20 * (4 * 3 + 4)
    assert group.usage.memory()["state"] == 20 * 8 * 3


REFUSED = {
    "state_dict": lambda group: group.state.tensors(),
    "load_state_dict": lambda group: group.state.load({}),
    "pickle, copy.deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "add_table": lambda group: group.add_table(td.TableConfig("d", 4)),
    "to": lambda group: extension.move(group.tables, group.tables.memory),
    "set_optimizer": lambda group: group.set_optimizer(td.Adam(lr=0.1)),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_needs_all_rows_in_memory_is_refused(call: str) -> None:
    plain, group, _ = pair_of_groups(td.SGD(lr=0.1))
    for of in (plain, group):
        of.insert_or_assign(0, torch.arange(9), rows_of(0, 9, 1))
    tables = group.tables
    with pytest.raises(RuntimeError, match=rf"^{call}.*\['a', 'b', 'c'\].*checkpoint") as error:
        REFUSED[call](group)
    assert "torch_dynemb.checkpoint." in str(error.value)
    assert group.tables is tables
    check_equal(plain, group)


def test_tables_of_another_slab_are_named() -> None:
    _, group, _ = pair_of_groups(td.SGD(lr=0.1), "c")
    with pytest.raises(RuntimeError, match=r"the rows of \['c'\] are in a store"):
        group.state.tensors()
