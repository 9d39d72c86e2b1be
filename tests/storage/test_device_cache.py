"""Rows in a store beneath caches in host memory and in HBM: bits, tiers, refusals."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_groups import emulated_cuda
from emulator.mode import created_bytes, set_capturing, set_memory_limit, set_seed, waits
from execution import threads
from group_calls import same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_exactness import CALLS, KINDS, check_sequence, pair_of
from test_host_cache import SETTINGS, check_same, new_table, tables, train_some, train_table
from tiered_pairs import STORES, Batch, Pair, storage_of

import torch_dynemb as td
from torch_dynemb import checkpoint

pytestmark = pytest.mark.own_device

FILES = STORES[-1]
ALL = torch.arange(260)


@pytest.fixture(autouse=True)
def no_setting_after_a_test() -> Iterator[None]:
    gc.collect()
    with threads(1):
        yield
    set_seed(0)
    set_memory_limit(None)
    set_capturing(False)


def stored(path: Path, kind: str = FILES, rows: int = 64, host_rows: int = 96) -> Any:
    return storage_of(kind, path, cache=f"{host_rows} rows", device_cache=f"{rows} rows")


# -- bits ----------------------------------------------------------------------------------------

SHORT = {("split", "python", 64), ("8 bits", FILES, 8), ("least recent", FILES, 64)}


@pytest.mark.parametrize(
    ("kind", "store", "slots"),
    [
        pytest.param(*of, marks=() if of in SHORT else pytest.mark.long)
        for of in ((k, s, n) for k in SETTINGS for s in ("python", FILES) for n in (8, 64))
    ],
)
def test_bits_of_tables_in_hbm(kind: str, store: str, slots: int, tmp_path: Path) -> None:
    """8 slots do not suffice for a step: the cache grows for it, and shrinks."""
    of_tables, optimizer, arguments = SETTINGS[kind]
    with emulated_cuda():
        pair = Pair(tables(**of_tables), optimizer, stored(tmp_path, store, slots), **arguments)
        train_some(pair)
        pair.step()  # a read has made the cache grow
        stats = pair.tiered.group.usage.storage()
        assert stats is not None
        assert min(stats.evicted, stats.hits, stats.misses, stats.prefetched) > 0
        assert min(stats.write_backs, stats.host_write_backs, stats.host_evicted) > 50
        assert stats.cached <= stats.slots + stats.slots // 16


@pytest.mark.long
@pytest.mark.parametrize("store", ["python", FILES])
def test_micro_batches_and_changes_from_outside(store: str, tmp_path: Path) -> None:
    with emulated_cuda():
        pair = Pair(tables(), td.Adam(lr=0.1), stored(tmp_path, store), split=True)
        for step in range(3):
            pair.prefetch(Batch(40 * step + 20, 30, 1))
            pair.micro_batches(Batch(20 * step, 60, 1), Batch(90 * step, 60, 3))
            pair.groups(
                lambda group, s=step: [group.erase(t, Batch(9 * s, 40, 2).ids()) for t in range(3)]
            )
            pair.train(Batch(11 * step, 40, 2))
            values = torch.linspace(-1, 1, 4 * 30).reshape(30, 4)
            pair.groups(lambda group, v=values: group.insert_or_assign(2, Batch(5, 30, 5).ids(), v))
            pair.step()
            pair.groups(lambda group: [group.remove(t, norm_below=0.8) for t in range(3)])
            pair.read(Batch(7 * step, 60, 2))
            pair.check()
        pair.groups(lambda group: [group.clear(t) for t in range(3)])
        pair.compact()
        pair.train(Batch(0, 200, 1))
        pair.step()
        pair.check()


def test_an_id_that_is_erased_twice_in_a_call_has_one_slot(tmp_path: Path) -> None:
    with emulated_cuda():
        pair = Pair(tables(), td.Adam(lr=0.1), stored(tmp_path, "python"))
        pair.train(Batch(0, 40, 1))
        for _ in range(3):  # then no slot is in use
            pair.step()
        pair.groups(lambda group: [group.erase(t, Batch(9, 20, 0).ids()) for t in range(3)])
        pair.train(Batch(0, 60, 1))
        pair.step()
        pair.check()


@pytest.mark.parametrize("store", ["python", FILES])
@pytest.mark.parametrize("kind", KINDS)
@given(calls=st.lists(CALLS, min_size=4, max_size=20), slots=st.sampled_from([6, 64]))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.long
def test_sequences(
    kind: str, store: str, tmp_path_factory: Any, calls: list[tuple[Any, ...]], slots: int
) -> None:
    with emulated_cuda():
        path = tmp_path_factory.mktemp("store")
        check_sequence(pair_of(kind, lambda: stored(path, store, slots)), calls)


# -- checkpoints ---------------------------------------------------------------------------------

SOURCES = {
    "hbm": lambda path: None,
    "host": lambda path: td.HostStore(cache="70 rows"),
    "store": lambda path: stored(path),
}


@pytest.mark.parametrize(
    ("source", "target"),
    [("store", "store"), ("store", "hbm"), ("host", "store"), ("hbm", "store")],
)
def test_checkpoints_of_every_tier(source: str, target: str, tmp_path: Path) -> None:
    with emulated_cuda():
        saved = new_table(SOURCES[source](tmp_path / "rows"))
        checkpoint.save(tmp_path / "saved", saved)
        loaded = new_table(SOURCES[target](tmp_path / "other rows"))
        loaded.group.fill(0, 0.5)
        checkpoint.load(tmp_path / "saved", loaded)
        check_same(saved, loaded)
        for table in (saved, loaded):
            train_table(table)
        check_same(saved, loaded)


def test_a_checkpoint_moves_between_devices(tmp_path: Path) -> None:
    with emulated_cuda():
        saved = new_table(stored(tmp_path / "rows"))
        checkpoint.save(tmp_path / "saved", saved)
        expected = saved.group.read(0, ALL)
    on_cpu = new_table(stored(tmp_path / "rows of the CPU"))
    stats = on_cpu.group.usage.storage()
    assert stats is not None
    assert (stats.slots, stats.host_slots) == (96, 0)  # one cache, in host memory
    checkpoint.load(tmp_path / "saved", on_cpu)
    assert same_bits(on_cpu.group.read(0, ALL), expected)
    checkpoint.save(tmp_path / "back", on_cpu)
    with emulated_cuda():
        loaded = new_table(stored(tmp_path / "rows again"))
        checkpoint.load(tmp_path / "back", loaded)
        check_same(saved, loaded)


def test_a_save_beside_training(tmp_path: Path) -> None:
    with emulated_cuda():
        table = new_table(stored(tmp_path / "rows"))
        expected = table.group.read(0, ALL)
        saving = checkpoint.save(tmp_path / "saved", table, asynchronous=True)
        train_table(table)
        saving.wait()
        assert not same_bits(table.group.read(0, ALL), expected)
        loaded = new_table()
        checkpoint.load(tmp_path / "saved", loaded)
        assert same_bits(loaded.group.read(0, ALL), expected)


def test_frozen_copies(tmp_path: Path) -> None:
    with emulated_cuda():
        table = new_table(stored(tmp_path))
        frozen = td.freeze(table)
        table.eval()
        assert same_bits(frozen(ALL), table(ALL))


# -- tiers ---------------------------------------------------------------------------------------


def wide_table(storage: Any, **arguments: Any) -> td.DynamicEmbedding:
    settings = {"optimizer": td.Adam(lr=0.1), "storage": storage, "max_rows": 50_000}
    return td.DynamicEmbedding(64, **{"name": "t", **settings, **arguments})


def train_ids(table: td.DynamicEmbedding, ids: torch.Tensor) -> None:
    table(ids).sin().sum().backward()
    table.optimizer.step()


@pytest.mark.long
def test_slots_lie_in_hbm_and_grow_for_a_step(tmp_path: Path) -> None:
    gc.collect()
    start = created_bytes()
    row = 3 * 4 * 64
    with emulated_cuda():
        table = wide_table(stored(tmp_path, rows=1000, host_rows=20_000))
        places = table.group.usage.split_rows()
        train_ids(table, torch.arange(500))
        assert table.group.usage.split_rows() == places
        with pytest.warns(RuntimeWarning, match="needed 15000 rows in GPU memory at once, but dev"):
            train_ids(table, torch.arange(15_000))
        assert table.group.usage.split_rows() == places  # it has shrunk
        stats = table.group.usage.storage()
        assert stats is not None
        assert (stats.slots, stats.cached) == (1000, 1000)
        assert stats.host_cached == 15_000
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_ids(table, torch.arange(600))
        set_memory_limit(created_bytes() + 3000 * row)
        before = table.group.read(0, torch.arange(100))
        with pytest.raises(td.errors.DeviceMemoryError, match="needs 15000 rows in GPU memory at"):
            train_ids(table, torch.arange(15_000))
        set_memory_limit(None)
        assert same_bits(table.group.read(0, torch.arange(100)), before)
        train_ids(table, torch.arange(600))
        del table
        gc.collect()
    assert created_bytes() == start


def test_one_wait_a_lookup(tmp_path: Path) -> None:
    with emulated_cuda():
        table = wide_table(stored(tmp_path, rows=300))
        for first in range(0, 900, 300):
            train_ids(table, torch.arange(first, first + 300))
        ids = torch.arange(200)
        table(ids).sum().backward()  # some rows come, and others leave
        table.optimizer.step()
        before = waits()
        table(ids + 300).sum().backward()
        more = waits() - before
        table.optimizer.step()
    assert more["cudaStreamSynchronize"] == 1
    assert more["cudaDeviceSynchronize"] == 0


def test_a_prefetch_leaves_the_store_to_a_thread(tmp_path: Path) -> None:
    with emulated_cuda():
        table = wide_table(stored(tmp_path, rows=300, host_rows=64))
        for first in range(0, 900, 300):
            train_ids(table, torch.arange(first, first + 300))
        ids = torch.arange(100)
        table.group.prefetch(ids, torch.tensor([0, 100]), [0])
        table.optimizer.step()
        before = table.group.usage.storage()
        table(ids)
        after = table.group.usage.storage()
        assert before is not None
        assert after is not None
        assert before.prefetched == 100
        assert (after.hits - before.hits, after.misses - before.misses) == (100, 0)
        assert after.reads == before.reads > 0


# -- refusals ------------------------------------------------------------------------------------


def test_a_gpu_needs_a_cache_of_its_own(tmp_path: Path) -> None:
    with emulated_cuda(), pytest.raises(RuntimeError, match="a GPU needs a cache of its own above"):
        new_table(td.SSDStore(tmp_path))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "SSDStore: device_cache is 0, expected at least 1 byte"),
        (1.5, "SSDStore: device_cache is 1.5, expected a fraction above 0"),
        ("0 rows", "SSDStore: device_cache is '0 rows', expected 1 row at least"),
    ],
)
def test_wrong_caches(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        td.SSDStore(tmp_path, device_cache=given)


def test_a_capture_names_the_host_store(tmp_path: Path) -> None:
    with emulated_cuda():
        table = wide_table(stored(tmp_path))
        train_ids(table, torch.arange(50))
        before = table.group.read(0, torch.arange(50))
        set_capturing(True)
        with pytest.raises(RuntimeError, match=r"storage=torch_dynemb.HostStore\(cache=...\)"):
            table(torch.arange(50))
        set_capturing(False)
        assert same_bits(table.group.read(0, torch.arange(50)), before)


def test_compiled_steps_name_the_host_store(tmp_path: Path) -> None:
    with emulated_cuda():
        table = wide_table(stored(tmp_path))
    for module in (table, table.eval()):  # compilers trace nothing on the emulated GPU
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"leave the lookup out of torch.compile, or use Host"):
            torch.compile(module, fullgraph=True, backend="eager")(torch.arange(50))
