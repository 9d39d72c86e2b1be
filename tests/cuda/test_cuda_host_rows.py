"""Rows beyond a budget of GPU memory lie in host memory: bits, budgets, refusals, captures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_groups import different_state, emulated_cuda
from emulator.mode import (
    HOST_LOCATIONS,
    created_bytes,
    forbidden_calls,
    host_bytes,
    refuse_locations,
    set_capturing,
    set_host_limit,
    set_memory_limit,
)
from group_calls import train

import torch_dynemb as td
from torch_dynemb import ops

pytestmark = pytest.mark.own_device

MIB = 1 << 20
PAGE = 2 * MIB
DIM = 64
ROW = 3 * 4 * DIM  # bytes of weights and Adam's two moments
IDS = 12_000


@pytest.fixture(autouse=True)
def no_setting_after_a_test() -> Iterator[None]:
    gc.collect()
    yield
    set_memory_limit(None)
    set_host_limit(None)
    set_capturing(False)
    refuse_locations()


def make_group(storage: Any = None, dims: tuple[int, ...] = (DIM,), **arguments: Any) -> Any:
    tables = [td.TableConfig(f"table{t}", dim, storage=storage) for t, dim in enumerate(dims)]
    with emulated_cuda():
        return td.TableGroup(tables, **{"optimizer": td.Adam(lr=0.1), "seed": 1, **arguments})


def train_batches(group: td.TableGroup, batches: int = 4) -> None:
    torch.manual_seed(0)
    for batch in range(batches):
        ids = torch.randint(IDS * (batch + 1) // batches, (IDS // batches,))
        train(group, 0, ids, torch.randn(ids.numel(), DIM))
        group.end_step()


def places(group: td.TableGroup) -> dict[str, int]:
    with emulated_cuda():
        return group.usage.split_rows()


# -- results -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("hbm", [0, "8MiB", "1GiB"], ids=["none", "some", "all"])
def test_bits_do_not_depend_on_the_budget(hbm: int | str) -> None:
    whole = make_group(max_rows=IDS)
    split = make_group(td.HostStore(hbm=hbm), max_rows=IDS)
    with emulated_cuda():
        for group in (whole, split):
            train_batches(group)
            group.erase(0, torch.arange(0, IDS, 3))
            train_batches(group, batches=1)
            group.compact()
            train_batches(group, batches=2)
    assert different_state(whole, split) == []
    assert places(whole) == {"hbm": 0, "host": 0}
    found = places(split)
    assert (found["host"] == 0) == (hbm == "1GiB")
    assert found["host"] == host_bytes()
    assert sum(found.values()) >= whole.size(0) * ROW


def test_hbm_is_used_first_and_never_beyond_the_budget() -> None:
    """The first page of each of the three tensors is there before the budget."""
    group = make_group(td.HostStore(hbm="8MiB"))
    assert places(group) == {"hbm": 3 * PAGE, "host": 0}
    for begin in range(0, IDS, IDS // 8):
        with emulated_cuda():
            group.insert(0, torch.arange(begin, begin + IDS // 8))
        found = places(group)
        assert found["hbm"] <= 8 * MIB
        assert found["host"] == 0 or found["hbm"] == 8 * MIB
    assert found["host"] > 0


def test_words_of_rows_and_narrow_rows_stay_in_hbm() -> None:
    """4 bytes a row are not worth a transfer: Row-wise state, and rows of 12 bytes."""
    group = make_group(td.HostStore(), dims=(3,), optimizer=td.RowWiseAdagrad(lr=0.1))
    with emulated_cuda():
        group.insert(0, torch.arange(2 * IDS))
    assert places(group) == {"hbm": 0, "host": 0}
    assert host_bytes() == 0


def test_tables_of_other_dims_need_no_storage() -> None:
    storage = td.HostStore()
    tables = [td.TableConfig("host", DIM, storage=storage), td.TableConfig("hbm", 32)]
    with emulated_cuda():
        group = td.TableGroup(tables, optimizer=td.SGD(lr=0.1))
        group.insert(0, torch.arange(IDS))
        before = host_bytes()
        assert before >= IDS * 4 * DIM - PAGE
        group.insert(1, torch.arange(IDS))
        assert host_bytes() == before


def test_on_the_cpu_all_rows_are_in_memory() -> None:
    groups = [
        td.TableGroup([td.TableConfig("table0", DIM, storage=storage)], optimizer=td.Adam(lr=0.1))
        for storage in (None, td.HostStore(hbm="1MiB"))
    ]
    for group in groups:
        train_batches(group, batches=1)
        assert group.usage.split_rows() == {"hbm": 0, "host": 0}
    assert different_state(*groups) == []


def test_delayed_gradients_find_their_rows() -> None:
    """Rows never leave their place, unlike those with a cache."""
    make_group(td.HostStore(), optimizer=td.SGD(lr=0.1, delayed_gradients="apply"))


def make_module(name: str = "table0") -> td.DynamicEmbedding:
    with emulated_cuda():
        return td.DynamicEmbedding(
            DIM, name=name, optimizer=td.Adam(lr=0.1), storage=td.HostStore(hbm="8MiB")
        )


def read_all(module: td.DynamicEmbedding) -> torch.Tensor:
    return module.group.read(0, torch.arange(IDS))


def saved_and_loaded(module: td.DynamicEmbedding, other: td.DynamicEmbedding, path: Path) -> None:
    td.checkpoint.save(path / "saved", module)
    td.checkpoint.load(path / "saved", other)


def state_taken(module: td.DynamicEmbedding, other: td.DynamicEmbedding, path: Path) -> None:
    other.group.state.load(module.group.state.tensors())


def state_dict_taken(module: td.DynamicEmbedding, other: td.DynamicEmbedding, path: Path) -> None:
    other.load_state_dict(module.state_dict())


@pytest.mark.parametrize("move", [saved_and_loaded, state_taken, state_dict_taken])
def test_rows_of_both_places_are_moved(move: Any, tmp_path: Path) -> None:
    """The driver takes a range for memory of the place where it begins: kernels gather rows."""
    module, other = make_module(), make_module()
    with emulated_cuda():
        for ids in (torch.arange(IDS), torch.arange(IDS // 2)):
            module(ids).square().sum().backward()
            module.optimizer.step()
        assert min(places(module.group).values()) > 0
        move(module, other, tmp_path)
        assert torch.equal(read_all(other), read_all(module))


def test_rows_of_both_places_are_frozen_and_extended() -> None:
    module = make_module()
    with emulated_cuda():
        module(torch.arange(IDS)).square().sum().backward()
        module.optimizer.step()
        expected = read_all(module)
        assert torch.equal(td.freeze(module)(torch.arange(IDS)), expected)
        module.set_optimizer(td.SGD(lr=0.1))
        assert torch.equal(read_all(module), expected)


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.long
def test_host_memory_is_given_back() -> None:
    gc.collect()
    start = created_bytes(), host_bytes()
    group = make_group(td.HostStore())
    with emulated_cuda():
        group.insert(0, torch.arange(IDS))
        full = host_bytes()
        assert full >= IDS * ROW - 3 * PAGE
        group.erase(0, torch.arange(100, IDS))
        group.compact()
        assert host_bytes() - start[1] <= 3 * PAGE
        group.insert(0, torch.arange(IDS))
        assert host_bytes() == full
        del group
        gc.collect()
    assert (created_bytes(), host_bytes()) == start


@pytest.mark.parametrize("bound", ["2MiB", None], ids=["argument", "driver"])
def test_without_host_memory_nothing_changes(bound: str | None) -> None:
    group = make_group(td.HostStore(hbm="8MiB", host=bound))
    with emulated_cuda():
        group.insert(0, torch.arange(1000))
        before = group.index.tables.clone(), created_bytes(), host_bytes()
        if bound is None:
            set_host_limit(host_bytes() + PAGE)
        message = (
            r"out of host memory: .* MiB, of which HBM gets the 8 MiB that storage allows, but \d+ "
            "MiB of host memory are left; no id was inserted. Give HostStore a larger hbm or host"
        )
        with pytest.raises(td.errors.HostMemoryError, match=message):
            group.insert(0, torch.arange(IDS))
        assert torch.equal(group.index.tables, before[0])
        assert (created_bytes(), host_bytes()) == before[1:]
        assert bool(group.contains(0, torch.arange(1000)).all())
        train(group, 0, torch.arange(900, 1100), torch.ones(200, DIM))
        assert group.size(0) == 1100


def test_a_gpu_without_the_memory_of_the_budget_says_so() -> None:
    group = make_group(td.HostStore(hbm="1GiB"))
    with emulated_cuda():
        group.insert(0, torch.arange(1000))
        set_memory_limit(created_bytes() + 8 * MIB)
        message = "out of GPU memory: .* give HostStore a smaller hbm"
        with pytest.raises(td.errors.DeviceMemoryError, match=message):
            group.insert(0, torch.arange(4 * IDS))
    assert group.size(0) == 1000


def test_the_other_kind_of_host_memory() -> None:
    refuse_locations("HOST")
    group = make_group(td.HostStore())
    with emulated_cuda():
        group.insert(0, torch.arange(IDS))
        assert host_bytes() > 0
        refuse_locations(*HOST_LOCATIONS)
        before = group.index.tables.clone(), created_bytes(), host_bytes()
        message = (
            r"find_or_insert_: the GPU driver maps no host memory for rows beyond HBM \(HOST: "
            r"operation not supported; HOST_NUMA: operation not supported\): install driver 580"
        )
        with pytest.raises(RuntimeError, match=message):
            group.insert(0, torch.arange(4 * IDS))
        assert torch.equal(group.index.tables, before[0])
        assert (created_bytes(), host_bytes()) == before[1:]
        refuse_locations()
        group.insert(0, torch.arange(4 * IDS))
    assert group.size(0) == 4 * IDS


def test_a_capture_maps_host_memory() -> None:
    group = make_group(td.HostStore())
    with emulated_cuda():
        train(group, 0, torch.arange(100), torch.ones(100, DIM))
        group.end_step()
        before = forbidden_calls(), places(group)["host"]
        set_capturing(True)
        train(group, 0, torch.arange(IDS), torch.ones(IDS, DIM))
        set_capturing(False)
        group.end_step()
    assert forbidden_calls() == before[0]
    assert places(group)["host"] > before[1]


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hbm": -1}, ValueError, "HostStore: hbm is -1, expected at least 1 byte"),
        ({"hbm": True}, TypeError, "HostStore: hbm is True, expected a number of bytes"),
        ({"hbm": None}, TypeError, "HostStore: hbm is None, expected a number of bytes"),
        ({"hbm": "40 XB"}, ValueError, "HostStore: hbm is '40 XB', expected a number of bytes"),
        ({"host": 0}, ValueError, "HostStore: host is 0, expected at least 1 byte"),
        ({"host": 0.5}, TypeError, "HostStore: host is 0.5, expected a number of bytes"),
    ],
)
def test_wrong_budgets(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        td.HostStore(**arguments)


def test_rows_in_one_tensor_have_one_storage() -> None:
    tables = [td.TableConfig("a", 8, storage=td.HostStore()), td.TableConfig("b", 8)]
    message = "table 'a' has storage HostStore.* but table 'b' has none: their rows have the same"
    with pytest.raises(ValueError, match=message):
        td.TableGroup(tables, optimizer=None)
    tables[1] = td.TableConfig("b", 4, storage=td.HostStore(hbm="1MiB"))
    with pytest.raises(ValueError, match="'a' and 'b' have different storage"):
        td.TableGroup(tables, optimizer=None)


def test_a_gpu_refuses_rows_on_disk_without_a_cache_of_its_own(tmp_path: Path) -> None:
    """The emulated device says that it is the CPU, so the check of the options stands for it."""
    from torch_dynemb.recis.tables.arguments import check_storage_on

    with pytest.raises(ValueError, match="needs a cache of its own above a store: give device_ca"):
        check_storage_on("HashTable", td.SSDStore(tmp_path), "cuda")
    check_storage_on("HashTable", td.SSDStore(tmp_path, device_cache="4GB"), "cuda")
    check_storage_on("HashTable", td.HostStore(), "cuda")


@pytest.mark.parametrize(
    ("slabs", "hbm", "host", "message"),
    [
        ([1], 0, None, "slabs has 1, expected 0 to 0"),
        ([0], -1, None, "hbm_bytes is -1 and host_bytes is -1, expected at least 0"),
        ([0], 0, -2, "hbm_bytes is 0 and host_bytes is -2, expected at least 0"),
    ],
)
def test_wrong_arguments_of_the_op(slabs: list[int], hbm: int, host: Any, message: str) -> None:
    group = make_group()
    with emulated_cuda():
        with pytest.raises(RuntimeError, match=message):
            ops.split_rows(group.index, slabs, hbm_bytes=hbm, host_bytes=host)
        ops.split_rows(group.index, [0], hbm_bytes=0, host_bytes=None)
        with pytest.raises(RuntimeError, match="have been split before: call it once"):
            ops.split_rows(group.index, [0], hbm_bytes=0, host_bytes=None)


def test_tensors_that_were_not_reserved() -> None:
    group = td.TableGroup([td.TableConfig("table0", 8)], optimizer=None)
    with emulated_cuda():
        with pytest.raises(RuntimeError, match="buckets was not made by reserve_cuda"):
            ops.split_rows(group.index, [0], hbm_bytes=0, host_bytes=None)
        assert ops.split_bytes(group.index) == (0, 0)
