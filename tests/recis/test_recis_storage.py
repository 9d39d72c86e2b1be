"""RecIS's modules over tables in a store, compared with tables in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lookups import embedding, option
from ranks import Ranks
from record_dict import RecordDict
from stored_lookups import Trained, features, trained

import torch_dynemb as td
from torch_dynemb.recis import (
    EmbeddingEngine,
    HashTable,
    SparseAdam,
)

pytestmark = pytest.mark.cpu_only("stores of rows are for the CPU")


def check_same(tiered: Trained, plain: Trained) -> None:
    for of_tiered, of_plain in ((tiered.outputs, plain.outputs), (tiered.rows, plain.rows)):
        for one, other in zip(of_tiered, of_plain, strict=True):
            assert one.keys() == other.keys()
            for name, of_feature in one.items():
                assert torch.equal(of_feature, other[name]), name
    assert tiered.sizes == plain.sizes
    assert all(stats.evicted > 0 for stats in tiered.stats)


@pytest.mark.parametrize("prefetching", [False, True])
@pytest.mark.parametrize(
    ("kind", "stored"),
    [("dict", ["item", "user", "wide"]), ("disk", ["item+user/rank0of1", "wide/rank0of1"])],
)
def test_tiered_engines_are_trained_as_those_in_memory(
    tmp_path: Path, kind: str, stored: list[str], prefetching: bool
) -> None:
    plain = trained(0, "memory", "", False)
    tiered = trained(0, kind, str(tmp_path), prefetching)
    check_same(tiered, plain)
    assert tiered.stored == stored
    assert [stats.prefetched > 0 for stats in tiered.stats] == [prefetching] * 2


@pytest.mark.long
def test_tiered_engines_over_two_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    plain = two_ranks.run(trained, "memory", "", False)
    tiered = two_ranks.run(trained, "disk", str(tmp_path), True)
    for one, other in zip(tiered, plain, strict=True):
        check_same(one, other)
        assert all(stats.prefetched > 0 for stats in one.stats)


@pytest.mark.long
def test_rows_beneath_a_cache_on_gpus(two_ranks: Ranks, tmp_path: Path) -> None:
    plain = two_ranks.run(trained, "hbm", "", True)
    for kind in ("cache", "cache above a disk"):
        cached = two_ranks.run(trained, kind, str(tmp_path / "rows"), True)
        for one, other in zip(cached, plain, strict=True):
            check_same(one, other)
            assert all(stats.prefetched > 0 for stats in one.stats)


def test_gradients_that_are_given_reach_rows_on_the_disk() -> None:
    tables = []
    for storage in (None, td.ExternalStore(RecordDict(), cache="64 rows")):
        table = HashTable([4], initializer=td.Normal(), seed=3, storage=storage)
        optimizer = SparseAdam({"table": table}, lr=0.1)
        for step in range(8):
            ids = torch.arange(40) + 20 * step
            table.accept_grad(ids, torch.full((40, 4), 1.0 + step))
            assert sorted(table.grad().ids.tolist()) == ids.tolist()
            optimizer.step()
            optimizer.zero_grad()
        tables.append(table)
    plain, tiered = (t.eval()(torch.arange(180)) for t in tables)
    assert torch.equal(plain, tiered)
    stats = tables[1].group.usage.storage()
    assert stats is not None
    assert stats.evicted > 0


def test_a_tiered_table_gets_its_optimizer_before_its_ids() -> None:
    storage = td.ExternalStore(RecordDict(), cache="64 rows")
    table = HashTable([4], storage=storage)
    ids, rows = torch.arange(3), torch.ones(3, 4)
    calls: dict[str, Any] = {
        "lookup": lambda: table(ids),
        "insert": lambda: table.insert(ids, rows),
        "accept_grad": lambda: table.accept_grad(ids, rows),
        "prefetch": lambda: table.prefetch(ids),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"'hashtable'\.{name}: it has storage and no opt"):
            call()
    table.group.insert(0, ids)
    with pytest.raises(RuntimeError, match=r"it has storage, and already ids, \{'hasht.*: 3\}: "):
        SparseAdam({"table": table})
    table.group.erase(0, ids)
    SparseAdam({"table": table})
    for call in calls.values():
        call()
    with pytest.raises(RuntimeError, match=r"it has storage, in which the state of Adam\(.*lies "):
        table.set_optimizer(td.SGD(lr=0.1))
    assert len(table.ids()) == 3


def test_a_store_belongs_to_what_tables_agree_on(tmp_path: Path) -> None:
    one, other = RecordDict(), RecordDict()
    shared = EmbeddingEngine(features(td.ExternalStore(one)))
    assert len(shared.tables) == 2
    paths = [None, td.SSDStore(tmp_path / "a"), td.SSDStore(tmp_path / "b")]
    assert len({option(storage=storage).coalesced_info() for storage in paths}) == 3
    with pytest.raises(ValueError, match=r"options \['a', 'b'\] share a table, but their storage"):
        EmbeddingEngine(
            {
                name: option(name, storage=td.ExternalStore(store))
                for name, store in (("a", one), ("b", other))
            }
        )


def test_rows_beyond_hbm_are_plain_memory_on_the_cpu() -> None:
    """No store waits for them, so ids may come before the optimizer."""
    outputs = []
    for storage in (None, td.HostStore(hbm="1MB")):
        table = HashTable([4], storage=storage)
        first = table(torch.arange(50)).detach()
        optimizer = SparseAdam({"table": table}, lr=0.1)
        for step in range(3):
            table(torch.arange(50) + 20 * step).square().sum().backward()
            optimizer.step()
        outputs.append((first, table.eval()(torch.arange(100))))
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one, other)


def test_rows_of_eight_bits_lie_in_a_store() -> None:
    table = embedding("content", dtype=torch.int8).hashtable
    store = RecordDict()
    storage = td.ExternalStore(store, cache="64 rows")
    tiered = embedding("content", dtype=torch.int8, storage=storage).hashtable
    ids = torch.arange(200)
    rows = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    for stored in (table, tiered):
        for part in ids.split(20):
            stored.insert(part, rows[part])
    for part in ids.split(20):
        assert torch.equal(tiered(part), table(part))
    assert len(store.records["content"]) >= 200 - 64


def test_slots_by_row_number_are_refused_and_those_by_id_are_read() -> None:
    table = HashTable([4], storage=td.ExternalStore(RecordDict(), cache="64 rows"))
    SparseAdam({"table": table})
    rows = torch.randn(100, 4)
    table.insert(torch.arange(100), rows)
    assert torch.equal(table.embeddings(), rows)
    slots = table.slot_group()
    assert torch.equal(slots["embedding"], rows)
    for slot in slots.slots():
        with pytest.raises(RuntimeError, match=r"^Slot\.value: the rows of \['hashtable'\] are"):
            slot.value()


def test_frozen_tables_have_the_rows_on_the_disk(tmp_path: Path) -> None:
    storage = td.SSDStore(tmp_path, cache="64 rows")
    live = HashTable([4], initializer=td.Normal(), storage=storage)
    optimizer = SparseAdam({"table": live}, lr=0.1)
    for step in range(4):
        live(torch.arange(50) + 40 * step).square().sum().backward()
        optimizer.step()
    stats = live.group.usage.storage()
    assert stats is not None
    assert stats.evicted > 0
    ids = torch.arange(300)
    assert torch.equal(td.freeze(live)(ids), live.eval()(ids))
