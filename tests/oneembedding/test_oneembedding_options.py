"""Options of tables, stores and embeddings: what is refused, and with which words."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from small_embeddings import content, embedding

import torch_dynemb as td
from torch_dynemb import oneembedding

pytestmark = pytest.mark.cpu_only("arguments, which are the same on every device")

host_mem = oneembedding.make_cached_host_mem_store_options
ssd = oneembedding.make_cached_ssd_store_options


MIB = 1 << 20


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_gpu"),
    [
        # on the CPU a HostStore is memory
        (host_mem(5, "a", 10), td.HostStore(cache=5 * MIB), td.HostStore(cache=5 * MIB)),
        (
            ssd(5, "a", host_cache_budget_mb=100),
            td.SSDStore("a/0-2", cache=105 * MIB),
            td.SSDStore("a/0-2", cache=100 * MIB, device_cache=5 * MIB),
        ),
        (  # rows pass through host memory, whatever the budget is
            ssd(5, "a"),
            td.SSDStore("a/0-2", cache=5 * MIB),
            td.SSDStore("a/0-2", cache=64 * MIB, device_cache=5 * MIB),
        ),
        (
            ssd(0, "a", host_cache_budget_mb=100),
            td.SSDStore("a/0-2", cache=100 * MIB),
            td.SSDStore("a/0-2", cache=100 * MIB, device_cache=64 * MIB),
        ),
    ],
)
def test_caches_of_a_device(options: Any, on_cpu: Any, on_gpu: Any) -> None:
    assert options.storage(0, 2) == options.storage(0, 2, torch.device("cpu")) == on_cpu
    assert options.storage(0, 2, torch.device("cuda", 1)) == on_gpu
    with pytest.raises(RuntimeError, match=r"made for cpu: construct .* device='cuda:1'"):
        options.check_move("Embedding.to()", torch.device("cpu"), torch.device("cuda", 1))


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
    with pytest.raises(RuntimeError, match="caches of cached_host_mem were made for cpu: const"):
        module.to("meta")
