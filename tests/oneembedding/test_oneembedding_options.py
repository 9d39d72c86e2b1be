"""Options of tables, stores and embeddings: what is refused, and with which words."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_embeddings import UNIFORM, content, embedding, store

import torch_dynemb as td
from torch_dynemb import oneembedding

pytestmark = pytest.mark.cpu_only("arguments, which are the same on every device")

device_mem = oneembedding.make_device_mem_store_options
host_mem = oneembedding.make_cached_host_mem_store_options
ssd = oneembedding.make_cached_ssd_store_options


@pytest.mark.parametrize(
    ("make", "kind", "error"),
    [
        (lambda: device_mem(3, 10), TypeError, "persistent_path is 3, expected a path, or a list"),
        (lambda: device_mem([], 10), ValueError, "persistent_path is empty"),
        (lambda: device_mem(["a", 1], 10), TypeError, r"persistent_path is \['a', 1\]"),
        (lambda: device_mem("a", 0), ValueError, "capacity is 0, expected at least 1"),
        (lambda: device_mem("a", None), TypeError, "capacity is None, expected int"),
        (lambda: device_mem("a", 1.5), TypeError, "capacity is 1.5"),
        (lambda: device_mem("a", 10, size_factor=0), ValueError, "size_factor is 0"),
        (lambda: device_mem("a", 10, storage_dim=0), ValueError, "storage_dim is 0, expected at"),
        (
            lambda: device_mem("a", 10, physical_block_size=1024),
            ValueError,
            r"physical_block_size is 1024, expected one of \(512, 4096\)",
        ),
        (lambda: host_mem(0, "a", 10), ValueError, "cache_budget_mb is 0, expected at least 1"),
        (lambda: host_mem(1, "a", 0), ValueError, "capacity is 0"),
        (lambda: ssd(0, "a"), ValueError, "cache_budget_mb and host_cache_budget_mb are 0"),
        (lambda: ssd(-1, "a"), ValueError, "make_cached_ssd_store_options: cache_budget_mb is -1"),
        (lambda: ssd(1, "a", capacity=0), ValueError, "capacity is 0, expected at least 1"),
        (lambda: ssd(1, 3), TypeError, "persistent_path is 3"),
        (lambda: ssd(1, "a", host_cache_budget_mb=1.5), TypeError, "host_cache_budget_mb is 1.5"),
        (lambda: ssd(1, "a", segment=5), ValueError, "segment is 5, expected a multiple of 4096"),
        (lambda: ssd(1, "a", disk="1MB"), ValueError, "disk is '1MB', expected at least 4 seg"),
        (lambda: oneembedding.make_table_options(3), TypeError, "param is 3, expected an init"),
        (lambda: oneembedding.make_table_options([]), ValueError, "param is empty"),
        (lambda: oneembedding.make_table([UNIFORM]), TypeError, r"param\[0\] is Uniform"),
        (lambda: oneembedding.make_table(UNIFORM, capacity=0), ValueError, "capacity is 0"),
        (lambda: oneembedding.make_column_options(3), TypeError, "initializer is 3"),
        (lambda: embedding(name=3), TypeError, "name is 3"),
        (lambda: embedding(dims=0), ValueError, "embedding_dim is 0"),
        (lambda: embedding(dims=[]), ValueError, "embedding_dim is empty"),
        (lambda: embedding(dims=[4, 0]), ValueError, r"embedding_dim\[1\] is 0"),
        (lambda: embedding(dtype=torch.float64), TypeError, "dtype is torch.float64, expected"),
        (lambda: embedding(key_type=torch.int8), TypeError, "key_type is torch.int8, expected"),
        (lambda: embedding(tables=UNIFORM), TypeError, "tables is Uniform"),
        (lambda: embedding(tables=[UNIFORM]), TypeError, r"tables\[0\] is Uniform"),
        (lambda: embedding(tables=[]), TypeError, r"tables is \[\]"),
        (lambda: embedding(store_options={}), TypeError, r"store_options is {}, expected one such"),
        (lambda: embedding(default_initializer=3), TypeError, "default_initializer is 3"),
        (lambda: embedding(padding_idx=2**63), ValueError, "padding_idx is 9223372036854775808"),
        (
            lambda: embedding(padding_idx=-1, key_type=torch.uint32),
            ValueError,
            "padding_idx is -1, expected at least 0",
        ),
        (lambda: embedding(seed=-1), ValueError, "seed is -1"),
        (lambda: embedding(path=["a", "b"]), ValueError, "has 2 paths, but there are 1 ranks"),
        (
            lambda: embedding(1, store_options=store(), optimizer=td.Adam(lr=0.1)),
            ValueError,
            "size_factor is 1, .* with Adam it takes 12: give the store options size_factor=3",
        ),
    ],
)
def test_wrong_options_are_named(
    make: Callable[[], Any], kind: type[Exception], error: str
) -> None:
    with pytest.raises(kind, match=error):
        make()


@pytest.mark.parametrize("name", ["", "..", "a/b", 3])
def test_snapshots_have_names_of_folders(name: Any, tmp_path: Path) -> None:
    module = embedding(path=tmp_path)
    for call in (module.save_snapshot, module.load_snapshot):
        with pytest.raises((TypeError, ValueError), match=f"{call.__name__}: snapshot_name is"):
            call(name)
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_brings_everything_back(tmp_path: Path) -> None:
    options = {"path": str(tmp_path), "optimizer": td.Adam(lr=0.1), "padding_idx": 3}
    module, other = embedding(**options), embedding(**options)
    ids = torch.arange(12).view(4, 3)
    for _ in range(2):
        module(ids).sin().sum().backward()
        module.optimizer.step()
    module.save_snapshot("my_snapshot1")
    saved = content(module)
    report = other.load_snapshot("my_snapshot1")
    assert report.tables["table_2"].ids == 4
    assert content(other).keys() == saved.keys()
    for twin in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(ids), module.eval()(ids))
    for trained in (module.train(), other):
        trained(ids).sin().sum().backward()
        trained.optimizer.step()
    assert torch.equal(module(ids), other(ids))
    with pytest.raises(FileNotFoundError):
        other.load_snapshot("my_snapshot2")


def test_a_snapshot_with_state_wants_the_optimizer_first(tmp_path: Path) -> None:
    module = embedding(path=tmp_path, optimizer=td.Adam(lr=0.1))
    module(torch.arange(3)[None]).sum().backward()
    module.optimizer.step()
    module.save_snapshot("trained")
    plain = embedding(path=tmp_path)
    with pytest.raises(ValueError, match="optimizer"):
        plain.load_snapshot("trained")
    assert content(plain) == {}
    plain.load_snapshot("trained", optimizer_state=False)
    assert content(plain).keys() == content(module).keys()


def test_rows_in_host_memory_are_one_tier_on_the_cpu() -> None:
    module = embedding(store_options=host_mem(1, "nowhere", 100))
    assert module(torch.arange(3)[None]).shape == (1, 3, 4)
    with pytest.raises(RuntimeError, match="rows in host memory with a cache on meta are not buil"):
        module.to("meta")
    for options, place in ((host_mem(1, "a", 100), "in host memory"), (ssd(1, "a"), "on SSD")):
        with pytest.raises(RuntimeError, match=f"rows {place} with a cache on cuda:0 are not buil"):
            embedding(store_options=options, device="cuda:0")
