"""A full disk raises before the ids of a lookup are inserted and counted.

So a refused step can be repeated when there is room, and training goes on with the bits of
undisturbed training: rows, counts, admitted ids and evicted ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from execution import threads
from group_calls import same_bits
from stored_training import StoredModel
from tiered_pairs import SEGMENT, Pair, check_cache
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.recis import HashTable, SparseAdam, filter_out_sparse_param

pytestmark = pytest.mark.cpu_only("stores on disks are the CPU's")

FULL = r"disk full: .* rows of .*Nothing has been changed\. Give a larger disk="
DIM = 24
A_SEGMENT = 15 * 13  # records of 24 columns with Adam's state, 13 a page
COUNTS = td.Policy(score="frequency")
POLICIES = {
    "counted": COUNTS,
    "admitted at the second": td.Policy(score="frequency", admission=td.AdmitFrequent(2)),
    "sketch": td.Policy(score="step", admission=td.AdmitFrequentSketch(2, memory=4096)),
    "evicts": td.Policy(score="frequency", capacity=450),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def store(path: Path, *, disk: int = 5) -> td.SSDStore:
    """A store of so many segments."""
    return td.SSDStore(path, cache="64 rows", segment=SEGMENT, disk=disk * SEGMENT)


def index_of(group: td.TableGroup) -> list[Tensor]:
    """Copies of what lookups change: ids, counts, counters, and how rows are given out."""
    index = group.index
    active = [index.active_buckets(t) for t in range(len(index.meta))]
    words = [torch.cat([of[a] for a in active]) for of in (index.buckets, index.scores)]
    return words + [tensor.clone() for tensor in index[2:]]


def refused(group: td.TableGroup, lookup: Callable[[], object]) -> bool:
    """Return whether room for a lookup is missing; index and cache are unchanged then."""
    before = index_of(group)
    tiers = group.tables.tiers
    assert tiers is not None
    places, slots, free_slots, _ = tiers.tensors
    tensors = [*places, *slots, *free_slots]
    cache = [tensor.clone() for tensor in tensors]
    try:
        lookup()
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=FULL):
            raise error from None
        assert all(map(torch.equal, index_of(group), before))
        assert all(map(torch.equal, tensors, cache))
        check_cache(group)
        return True
    return False


class LookedUp(NamedTuple):
    """Rows of the tables in files, and how often they were refused."""

    tiered: Tensor
    refusals: int


def lookup_with_room(
    pair: Pair, lookup: Callable[[td.DynamicEmbeddingBagCollection], Tensor], oldest: Tensor
) -> LookedUp:
    """Look up in files; on a full disk the oldest ids of both modules are removed."""
    outputs: list[Tensor] = []
    refusals = 0
    while refused(pair.tiered.group, lambda: outputs.append(lookup(pair.tiered))):
        assert refusals == 0, "the disk is full although all other ids were removed"
        refusals += 1
        pair.groups(lambda group: [group.erase(0, oldest), group.erase(1, oldest * 3 + 1)])
    return LookedUp(outputs[0], refusals)


def prefetch_if_there_is_room(module: td.DynamicEmbeddingBagCollection, ids: Tensor) -> None:
    offsets = torch.arange(len(ids) + 1)
    try:
        module.prefetch({"a": (ids, offsets), "b": (ids, offsets)})
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=FULL):
            raise error from None


@pytest.mark.parametrize("kind", POLICIES)
def test_a_refused_step_counts_nothing(kind: str, tmp_path: Path) -> None:
    """Again and again, whenever the disk is full; then ids go, and the step is made again."""
    tables = [
        td.TableConfig(name, DIM, initializer=td.Uniform(-1.0, 1.0), policy=POLICIES[kind])
        for name in ("a", "b")
    ]
    pair = Pair(tables, td.Adam(lr=0.1), store(tmp_path))
    refusals = 0
    offsets = torch.arange(61)

    def looked_up(module: td.DynamicEmbeddingBagCollection, ids: Tensor) -> Tensor:
        return module({"a": (ids, offsets), "b": (ids * 3 + 1, offsets)})

    for step in range(60):
        first = 60 * (step // 2)  # each batch comes twice
        ids = torch.arange(first, first + 60)
        outputs = lookup_with_room(pair, functools.partial(looked_up, ids=ids), torch.arange(first))
        refusals += outputs.refusals
        plain = looked_up(pair.plain, ids)
        assert same_bits(plain.detach(), outputs.tiered.detach())
        (plain.sin().sum() + outputs.tiered.sin().sum()).backward()
        pair.step()
        if step % 3 == 2:
            prefetch_if_there_is_room(pair.tiered, torch.arange(first - 30, first + 90))
    assert refusals >= 2
    pair.check()


def new_table(storage: td.SSDStore | None, policy: td.Policy) -> td.DynamicEmbedding:
    torch.manual_seed(7)
    return td.DynamicEmbedding(
        DIM,
        name="t",
        optimizer=td.Adam(lr=0.1),
        policy=policy,
        initializer=td.Uniform(-1.0, 1.0),
        max_rows=4096,
        storage=storage,
    )


def trained(table: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    output = table(ids)
    output.sin().sum().backward()
    return output.detach()


def until_full(table: td.DynamicEmbedding, step: Callable[[Tensor], object]) -> list[Tensor]:
    """Train on new ids until the disk is full; return the batches, the last of which failed."""
    batches: list[Tensor] = []
    while not batches or not refused(table.group, lambda: step(batches[-1])):
        if batches:
            table.optimizer.step()
        batches.append(torch.arange(60) + 60 * len(batches))
    return batches


def test_a_compiled_step_that_is_refused_counts_nothing(tmp_path: Path) -> None:
    plain, table = new_table(None, COUNTS), new_table(store(tmp_path), COUNTS)
    torch._dynamo.reset()
    compiled = torch.compile(table, fullgraph=True)
    batches = until_full(table, lambda ids: trained(compiled, ids))
    assert len(batches) > 6
    assert refused(table.group, lambda: trained(compiled, batches[-1]))
    for batch in batches[:-1]:
        trained(plain, batch)
        plain.optimizer.step()
    for module in (plain, table):
        module.group.erase(0, torch.cat(batches[:5]))
    for batch in (batches[-1], batches[-2], batches[0], batches[-1]):
        assert same_bits(trained(plain, batch), trained(compiled, batch))
        for module in (plain, table):
            module.optimizer.step()
    columns = [c for c in td.ops.columns.Slab if c != td.ops.columns.Slab.ROW_BYTES]
    for name, mine in plain.group.index._asdict().items():
        other = getattr(table.group.index, name)
        if name == "slabs":
            mine, other = mine[:, columns], other[:, columns]
        if name not in ("meta", "policy"):
            assert torch.equal(mine, other), name
    ids = torch.cat(batches)
    assert same_bits(plain.eval()(ids), table.eval()(ids))


def test_what_is_in_memory_is_trained_where_the_disk_is_full(tmp_path: Path) -> None:
    """However many occurrences a batch has of it: it pushes nothing out."""
    table = new_table(store(tmp_path), COUNTS)
    batches = until_full(table, lambda ids: trained(table, ids))
    known = batches[-2].repeat(100)
    before = table(batches[-2]).detach().clone()
    trained(table, known)
    table.optimizer.step()
    assert not torch.equal(table(batches[-2]).detach(), before)
    assert refused(table.group, lambda: trained(table, batches[-1]))


@pytest.mark.parametrize("disk", [8, 16])
def test_a_disk_that_is_too_small_is_full_before_the_index(tmp_path: Path, disk: int) -> None:
    table = td.DynamicEmbedding(DIM, optimizer=td.Adam(lr=0.1), storage=store(tmp_path, disk=disk))
    batches = until_full(table, lambda ids: trained(table, ids))
    with pytest.raises(td.errors.DiskFullError, match=FULL):
        trained(table, batches[-1])


def test_a_store_that_is_opened_with_more_room_goes_on(tmp_path: Path) -> None:
    """From its snapshot, with the bits of training in memory."""
    policy = td.Policy(score="frequency", admission=td.AdmitFrequent(2))
    model = StoredModel(tmp_path, policy=policy, disk=4 * SEGMENT)
    model.train_steps(4)
    model.save("a")
    while not refused(model.users.group, model.step):
        assert model.steps < 100
    assert model.steps > 8
    del model
    model = StoredModel(tmp_path, policy=policy, disk=40 * SEGMENT)
    assert model.load() == 4
    undisturbed = StoredModel(None, policy=policy)
    assert undisturbed.train_steps(60)[4:] == model.train_steps(56)
    assert same_bits(undisturbed.values(), model.values())


def test_gradients_that_are_given_count_nothing_where_they_are_refused(tmp_path: Path) -> None:
    """By a hash table of recis, which inserts their ids."""
    admissions = {"t": td.AdmitFrequent(2)}
    table = HashTable(
        [DIM], name="t", storage=store(tmp_path), admissions=admissions, max_rows=4096
    )
    optimizer = SparseAdam(filter_out_sparse_param(table))
    group = table._group
    gradients = torch.ones(120, DIM)
    batches = [torch.arange(60).repeat(2)]
    while not refused(group, lambda: table.accept_grad(batches[-1], gradients)):
        optimizer.step()
        batches.append(batches[-1] + 60)
    assert len(batches) > 6
    assert refused(group, lambda: table.accept_grad(batches[-1], gradients))
    group.erase(0, torch.cat(batches[:5]))
    table.accept_grad(batches[-1], gradients)
    optimizer.step()
    assert len(table.ids()) == 60 * (len(batches) - 5)


def test_room_for_a_lookup_is_made_ready_while_none_is_written(tmp_path: Path) -> None:
    """So that the next lookup need not find its ids to know that there is room."""
    store = td.SSDStore(tmp_path / "rows", cache="64 rows", segment=1 << 16)
    table = td.DynamicEmbedding(8, name="t", optimizer=td.SGD(lr=0.1), storage=store)
    ids = torch.arange(64)
    disk = []
    for _ in range(2):
        table(ids).sum().backward()
        table.optimizer.step()
        tiers = table.group.tables.tiers
        assert tiers is not None
        tiers.drain()
        stats = table.group.usage.storage()
        assert stats is not None
        assert stats.bytes_written == 0
        disk.append(stats.disk_bytes)
    assert disk[0] == 0 < disk[1]
