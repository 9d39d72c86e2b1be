"""Rows in host memory beneath a cache in HBM: bits of tables in HBM, the plan, memory, refusals."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_model import CacheModel
from emulated_groups import emulated_cuda
from emulator.mode import (
    HOST_LOCATIONS,
    created_bytes,
    forbidden_calls,
    host_bytes,
    launches,
    refuse_locations,
    set_capturing,
    set_host_limit,
    set_memory_limit,
    set_seed,
    waits,
)
from execution import threads
from group_calls import same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_exactness import CALLS, KINDS, check_sequence, pair_of
from tiered_pairs import Batch, Pair, stored_rows

import torch_dynemb as td
from torch_dynemb import checkpoint, ops
from torch_dynemb.ops.columns import GENERATION_BITS

pytestmark = pytest.mark.own_device

MIB = 1 << 20
DIM = 64
UNIFORM = td.Uniform(-1.0, 1.0)


@pytest.fixture(autouse=True)
def no_setting_after_a_test() -> Iterator[None]:
    gc.collect()
    with threads(1):
        yield
    set_seed(0)
    set_memory_limit(None)
    set_host_limit(None)
    set_capturing(False)
    refuse_locations()


def cached(rows: int = 64) -> td.HostStore:
    return td.HostStore(cache=f"{rows} rows")


def make_group(storage: Any = None, dims: tuple[int, ...] = (DIM,), **arguments: Any) -> Any:
    tables = [td.TableConfig(f"table{t}", dim, storage=storage) for t, dim in enumerate(dims)]
    with emulated_cuda():
        return td.TableGroup(tables, **{"optimizer": td.Adam(lr=0.1), "seed": 1, **arguments})


# -- the plan ------------------------------------------------------------------------------------


def random_calls(seed: int, group: td.TableGroup, model: CacheModel, rows: int) -> None:
    """Calls on rows that now and then get another owner."""
    tiers, meta = group.tables.tiers.tensors, group.index.meta
    drawn = torch.Generator().manual_seed(seed)
    generations = torch.full((rows,), 2)  # 0 is none of an owner

    def draw(high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=drawn)

    for _ in range(40):
        kind, count = int(draw(8)), int(draw(60))
        # some rows are used more often than others
        numbers = torch.minimum(draw(rows, count), draw(rows, count))
        handles = numbers << GENERATION_BITS | generations[numbers]
        handles[draw(10, count) == 0] = -int(draw(3)) - 1
        if kind == 0:
            handles -= (draw(20, count) == 0) * (handles > 0) * 1  # of an earlier owner
        ahead = int(draw(3)) if kind == 1 else 0
        trains = kind >= 3 and ahead == 0
        staged = ops.StagedIds(meta, numbers + 1000, handles, torch.tensor([0, count]), [0])
        if ahead:
            ops.prefetch_(tiers, staged, ahead=ahead)
            model.stage(0, staged.ids.tolist(), handles.tolist(), trains=False, ahead=ahead)
        else:
            found = ops.stage_(tiers, staged, trains=trains)
            expected = model.stage(0, staged.ids.tolist(), handles.tolist(), trains=trains)
            assert found.tolist() == expected
        assert tiers.places[0][:rows].tolist() == model.places
        assert torch.equal(tiers.slots[0][: model.most], model.words_of_slots())
        assert torch.equal(tiers.clock, model.words_of_clock())
        if kind in (2, 5, 6):
            ops.end_epoch_(tiers)
            model.end_epoch()
        if kind == 4:
            generations[draw(rows, 5)] += 1


@pytest.mark.parametrize(
    ("slots", "order"),
    [
        (40, 1),
        *(pytest.param(n, k, marks=pytest.mark.long) for n in (5, 40, 150) for k in range(3)),
    ],
)
def test_the_plan_is_that_of_the_model(slots: int, order: int) -> None:
    rows = 200
    group = make_group(cached(slots), dims=(4,), max_rows=rows)
    set_seed(order)
    with emulated_cuda():
        random_calls(order, group, CacheModel(slots, rows, slots), rows)


# -- bits ----------------------------------------------------------------------------------------


def tables(**arguments: Any) -> list[td.TableConfig]:
    return [
        td.TableConfig("a", 4, initializer=UNIFORM, **arguments),
        td.TableConfig("b", 3, initializer=UNIFORM, padding_idx=0, **arguments),
        td.TableConfig("c", 4, feature_names=["c1", "c2"], **arguments),
    ]


def train_some(pair: Pair, steps: int = 8) -> None:
    """Batches that come back after others have taken their slots."""
    for step in range(steps):
        pair.train(Batch(37 * step, 60, 1 + step % 3))
        pair.step()
        pair.prefetch(Batch(31 * step, 20, 1))
        if step % 4 == 3:
            pair.read(Batch(11 * step, 50, 2))
            pair.check()


SETTINGS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "adam": ({}, td.Adam(lr=0.1), {}),
    "split": ({}, td.Adam(lr=0.1), {"split": True, "mode": "mean"}),
    "row state": ({"dtype": torch.float16}, td.RowWiseAdagrad(lr=0.1), {}),
    "8 bits": (
        {"dtype": torch.bfloat16},
        td.Adam(lr=0.1, state_dtype=torch.uint8, row_steps=True),
        {},
    ),
    "stochastic": ({"dtype": torch.bfloat16}, td.SGD(lr=0.1, stochastic_rounding=True), {}),
    "least recent": ({"policy": td.Policy(score="step", capacity=150)}, td.Adam(lr=0.1), {}),
    "admission": (
        {"policy": td.Policy(score="frequency", admission=td.AdmitFrequent(2), capacity=100)},
        td.Adagrad(lr=0.1),
        {},
    ),
}


SHORT = {("split", 64), ("8 bits", 8), ("least recent", 64)}


@pytest.mark.parametrize(
    ("kind", "slots"),
    [
        pytest.param(kind, slots, marks=() if (kind, slots) in SHORT else pytest.mark.long)
        for kind in SETTINGS
        for slots in (8, 64)
    ],
)
def test_bits_of_tables_in_hbm(kind: str, slots: int) -> None:
    """8 slots do not suffice for a step: most rows are updated at home."""
    of_tables, optimizer, arguments = SETTINGS[kind]
    with emulated_cuda():
        pair = Pair(tables(**of_tables), optimizer, cached(slots), **arguments)
        train_some(pair)
        stats = pair.tiered.group.usage.storage()
        moved = stats.bytes_read, stats.bytes_written
        assert min(stats.in_place, stats.evicted, stats.hits, *moved) > 0
        assert slots == 8 or min(stats.reads, stats.write_backs) > 100


@pytest.mark.long
def test_micro_batches_and_changes_from_outside() -> None:
    with emulated_cuda():
        pair = Pair(tables(), td.Adam(lr=0.1), cached(), split=True)
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


@pytest.mark.parametrize("kind", KINDS)
@given(calls=st.lists(CALLS, min_size=4, max_size=20), slots=st.sampled_from([6, 64]))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.long
def test_sequences(kind: str, calls: list[tuple[Any, ...]], slots: int) -> None:
    with emulated_cuda():
        check_sequence(pair_of(kind, lambda: cached(slots)), calls)


def test_tables_of_another_dim_stay_in_hbm() -> None:
    storage = cached()
    configs = [td.TableConfig("host", DIM, storage=storage), td.TableConfig("hbm", 32)]
    with emulated_cuda():
        group = td.TableGroup(configs, optimizer=td.SGD(lr=0.1), max_rows=50_000)
        group.insert(0, torch.arange(20_000))
        before = host_bytes()
        assert before >= 20_000 * 4 * DIM - 2 * MIB
        group.insert(1, torch.arange(20_000))
        assert host_bytes() == before


# -- checkpoints ---------------------------------------------------------------------------------

ALL = torch.arange(260)


def train_table(table: td.DynamicEmbedding, steps: int = 4) -> None:
    for step in range(steps):
        table(torch.arange(60 * step, 60 * step + 100) % 250).sin().sum().backward()
        table.optimizer.step()


def new_table(storage: Any = None, **arguments: Any) -> td.DynamicEmbedding:
    """With rows in slots and at home, and ids without an update."""
    settings = {"optimizer": td.Adam(lr=0.1), "storage": storage, "max_rows": 1000}
    table = td.DynamicEmbedding(4, **{"name": "t", **settings, **arguments})
    train_table(table)
    table.group.insert(0, ALL[250:])
    return table


def check_same(*tables: td.DynamicEmbedding) -> None:
    assert same_bits(*(table.group.read(0, ALL) for table in tables))
    rows = [stored_rows(table.group, 0, ALL[:250]) for table in tables]
    assert all(bool(of.written.all()) for of in rows)
    assert same_bits(*(of.payload for of in rows))


@pytest.mark.parametrize(
    ("source", "target"),
    [(cached(70), cached(90)), (cached(70), None), (None, cached(70)), (td.HostStore(), cached())],
    ids=["cache to cache", "cache to hbm", "hbm to cache", "split to cache"],
)
@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.long)])
def test_checkpoints(source: Any, target: Any, exact: bool, tmp_path: Path) -> None:
    """A load replaces rows in slots and at home, and pending handles of neither stay."""
    arguments = {} if exact else {"policy": td.Policy(score="step")}
    with emulated_cuda():
        saved = new_table(source)
        checkpoint.save(tmp_path / "saved", saved)
        loaded = new_table(target, **arguments)
        loaded.group.fill(0, 0.5)
        checkpoint.load(tmp_path / "saved", loaded)
        check_same(saved, loaded)
        for table in (saved, loaded):
            train_table(table)
        check_same(saved, loaded)


def test_a_checkpoint_of_a_cache_loads_on_the_cpu(tmp_path: Path) -> None:
    with emulated_cuda():
        saved = new_table(cached())
        checkpoint.save(tmp_path / "saved", saved)
        expected = saved.group.read(0, ALL)
    loaded = new_table(cached())
    loaded.group.fill(0, 0.5)
    checkpoint.load(tmp_path / "saved", loaded)
    assert same_bits(loaded.group.read(0, ALL), expected)
    assert loaded.group.usage.storage() is None  # all rows are in memory


def test_frozen_copies() -> None:
    with emulated_cuda():
        table = new_table(cached())
        frozen = td.freeze(table)
        table.eval()
        assert same_bits(frozen(ALL), table(ALL))


# -- memory --------------------------------------------------------------------------------------


def wide_table(storage: Any = None, **arguments: Any) -> td.DynamicEmbedding:
    settings = {"optimizer": td.Adam(lr=0.1), "storage": storage, "max_rows": 50_000}
    return td.DynamicEmbedding(DIM, **{"name": "t", **settings, **arguments})


def train_ids(table: td.DynamicEmbedding, ids: torch.Tensor) -> None:
    table(ids).sin().sum().backward()
    table.optimizer.step()


@pytest.mark.long
def test_homes_lie_in_host_memory_and_slots_in_hbm() -> None:
    gc.collect()
    start = created_bytes(), host_bytes()
    ids, row = torch.arange(8000), 3 * 4 * DIM
    with emulated_cuda():
        table = wide_table(td.HostStore(cache="1MiB"))
        train_ids(table, ids)
        places = table.group.usage.split_rows()
        assert places["host"] == host_bytes() - start[1] >= len(ids) * row - 6 * MIB
        assert places["hbm"] == 3 * 2 * MIB  # a page of each tensor
        slots = (1 << 20) // (row + 4 + 36)
        stats = table.group.usage.storage()
        assert (stats.slots, stats.cached, stats.in_place) == (slots, slots, 8000 - slots)
        table.group.clear(0)
        table.group.compact()
        assert host_bytes() - start[1] <= 3 * 2 * MIB
        assert table.group.usage.storage().cached == 0
        train_ids(table, ids[:2000])
        del table
        gc.collect()
    assert (created_bytes(), host_bytes()) == start


def test_a_fraction_grows_with_the_rows() -> None:
    with emulated_cuda():
        table = wide_table(td.HostStore(cache="50%"), max_rows=200_000)
        for ids in (100, 2000, 6000):
            train_ids(table, torch.arange(ids))
            assert table.group.usage.storage().slots == max(64, ids // 2)
        table.group.insert(0, torch.arange(40_000))
        set_memory_limit(created_bytes())
        table.optimizer.step()  # HBM has no room for more slots: the step does not fail
        assert 3000 <= table.group.usage.storage().slots < 20_000


def test_hbm_and_host_memory_that_are_short() -> None:
    with emulated_cuda():
        table = wide_table(td.HostStore(cache="64 rows", host="4MiB"))
        group = table.group
        group.insert(0, torch.arange(1000))
        before = group.index.tables.clone(), created_bytes(), host_bytes()
        message = (
            "out of host memory: .* are left; no id was inserted. Give HostStore a larger host"
        )
        with pytest.raises(td.errors.HostMemoryError, match=message):
            table(torch.arange(20_000))
        assert torch.equal(group.index.tables, before[0])
        assert (created_bytes(), host_bytes()) == before[1:]
        train_ids(table, torch.arange(900))
        set_memory_limit(created_bytes() + 64 * MIB)
        message = "out of GPU memory: the cache of rows needs .* give HostStore a smaller cache"
        with pytest.raises(td.errors.DeviceMemoryError, match=message):
            wide_table(td.HostStore(cache="1GiB"), max_rows=10_000_000)


def test_bytes_and_launches_of_lookups() -> None:
    """Each missing row comes down, and its victim goes up; hits move nothing."""
    row = 3 * 4 * DIM
    with emulated_cuda():
        table = wide_table(cached(64))
        train_ids(table, torch.arange(64))
        train_ids(table, torch.arange(64, 128))
        usage, tiers = table.group.usage, table.group.tables.tiers
        for first, missing in ((64, 0), (0, 64), (32, 32)):
            before = usage.storage()
            train_ids(table, torch.arange(first, first + 64))
            after = usage.storage()
            assert after.hits - before.hits == 64 - missing
            assert after.misses - before.misses == missing
            assert after.bytes_read - before.bytes_read == missing * row
            assert after.bytes_written - before.bytes_written == missing * row
            ids, offsets = torch.arange(first, first + 64), torch.tensor([0, 64])
            handles = table.group.find(ids, offsets, [0]).handles
            staged = ops.StagedIds(table.group.index.meta, ids, handles, offsets, [0])
            launched = launches()
            tiers.stage(staged, trains=True)
            # words, an epoch, four kernels that plan, five that search victims, then slots,
            # moves and handles
            assert launches() - launched == 14
            table.optimizer.step()


def test_a_driver_that_maps_no_host_memory() -> None:
    with emulated_cuda():
        table = wide_table(cached())
        train_ids(table, torch.arange(100))
        refuse_locations(*HOST_LOCATIONS)
        before = table.group.index.tables.clone(), created_bytes(), host_bytes()
        with pytest.raises(RuntimeError, match="driver maps no host memory for rows beyond HBM"):
            table(torch.arange(20_000))
        assert torch.equal(table.group.index.tables, before[0])
        assert (created_bytes(), host_bytes()) == before[1:]
        train_ids(table, torch.arange(100))


def test_a_step_waits_for_nothing() -> None:
    ids = torch.arange(300)
    with emulated_cuda():
        table = wide_table(cached())
        train_ids(table, ids)
        before = waits()
        train_ids(table, ids)
        table.group.prefetch(ids[:50], torch.tensor([0, 50]), [0])
        more = waits() - before
    assert more["cudaDeviceSynchronize"] == more["cudaStreamSynchronize"] == 0


def test_a_capture_makes_no_forbidden_call() -> None:
    with emulated_cuda():
        tables = wide_table(), wide_table(cached())
        for table in tables:
            for step in range(4):
                before = forbidden_calls()
                set_capturing(step == 2)  # all work is done at once
                table(torch.arange(100 * step, 100 * step + 200)).sin().sum().backward()
                set_capturing(False)
                table.optimizer.step()
                assert forbidden_calls() == before
        assert same_bits(*(table.group.read(0, torch.arange(500)) for table in tables))


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cache": 0}, ValueError, "HostStore: cache is 0, expected at least 1 byte"),
        ({"cache": 1.5}, ValueError, "HostStore: cache is 1.5, expected a fraction above 0"),
        ({"cache": "0 rows"}, ValueError, "HostStore: cache is '0 rows', expected 1 row at least"),
        ({"cache": "some"}, ValueError, "HostStore: cache is 'some', expected"),
        ({"cache": True}, TypeError, "HostStore: cache is True, expected bytes"),
        ({"cache": 0.1, "hbm": "1GB"}, ValueError, "hbm is '1GB' and cache is 0.1, but HBM either"),
    ],
)
def test_wrong_caches(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        td.HostStore(**arguments)


def test_a_cache_for_less_than_a_row() -> None:
    message = "HostStore has cache='100B', of which .* a share of 1, less than one row of 808 bytes"
    with pytest.raises(ValueError, match=message):
        make_group(td.HostStore(cache="100B"), max_rows=100)
    with pytest.raises(ValueError, match=r"cache='1 rows', of which .* a share of 0.5, less than"):
        make_group(cached(1), dims=(DIM, 32), max_rows=100)


def test_late_gradients_are_refused() -> None:
    message = (
        "storage HostStore.*delayed_gradients='apply', but rows stay in their place only until"
    )
    with pytest.raises(ValueError, match=message):
        make_group(cached(), optimizer=td.SGD(lr=0.1, delayed_gradients="apply"))
    with emulated_cuda():
        table = new_table(cached())
        output = table(ALL)
        table.optimizer.step()
        with pytest.raises(RuntimeError, match="backward of a lookup 1 steps ago"):
            output.sum().backward()


def test_refusals_name_the_cache(tmp_path: Path) -> None:
    with emulated_cuda():
        table = new_table(cached())
        where = r"\['t'\] are in host memory beneath a cache, HostStore\(cache=...\): "
        for call, remedy in (
            (table.state_dict, "save the model with torch_dynemb.checkpoint.save"),
            (lambda: copy.deepcopy(table), "save the model with torch_dynemb.checkpoint.save"),
        ):
            with pytest.raises(RuntimeError, match=where + remedy):
                call()
        with pytest.raises(RuntimeError, match="have storage HostStore, which does not support"):
            checkpoint.save_snapshot(table, "name")


def test_tensors_without_a_cache() -> None:
    group = make_group(cached(), max_rows=1000)
    tiers = group.tables.tiers.tensors
    ids = torch.arange(3)
    staged = ops.StagedIds(group.index.meta, ids, ids << GENERATION_BITS | 1, ids[:0], [0])
    copies = tiers._replace(clock=tiers.clock.clone())
    with emulated_cuda():
        with pytest.raises(
            RuntimeError, match="stage_: tier_clock belongs to no group with a cache"
        ):
            ops.stage_(copies, staged, trains=True)
        with pytest.raises(RuntimeError, match="end_epoch_: tier_clock belongs to no group"):
            ops.end_epoch_(copies)
        other = make_group(cached(), max_rows=1000).tables.tiers.tensors
        with pytest.raises(RuntimeError, match="are not those of the group of tier_clock"):
            ops.prefetch_(tiers._replace(places=other.places), staged)
        with pytest.raises(RuntimeError, match="ahead is 0, expected 1 at least"):
            ops.prefetch_(tiers, staged, ahead=0)
        with pytest.raises(RuntimeError, match="have a cache or have been split before"):
            ops.bind_tiers(group.index, tiers, group.rows, fraction=0.0, host_bytes=None)
        with pytest.raises(RuntimeError, match="fraction is 2"):
            ops.bind_tiers(group.index, tiers, group.rows, fraction=2.0, host_bytes=None)
        far = staged._replace(handles=staged.handles + (1000 << GENERATION_BITS))
        ops.stage_(tiers, far, trains=True)
        with pytest.raises(RuntimeError, match="stage_: a handle names row 100"):
            ops.raise_device_errors(0)
