"""Rows on SSD: the same bits as in memory, and where the files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_embeddings import content, embedding, store
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import oneembedding

pytestmark = pytest.mark.cpu_only("rows on SSD are built for the CPU")

DIM = 32


def on_ssd(path: Any, **options: Any) -> Any:
    """An embedding with a cache of 1 MiB, which has room for some 2,000 rows."""
    small = {"size_factor": 3, "segment": 1 << 16, "disk": "8MB"}
    store = oneembedding.make_cached_ssd_store_options(
        0, path, None, **small, host_cache_budget_mb=1
    )
    return embedding(2, DIM, store_options=store, **options)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 4000, (500, 2), generator=generator) for _ in range(12)]


@pytest.mark.parametrize("prefetches", [False, True])
def test_rows_on_ssd_have_the_bits_of_rows_in_memory(tmp_path: Path, prefetches: bool) -> None:
    modules = (
        on_ssd(tmp_path),
        embedding(2, DIM, store_options=store(capacity=10**6, size_factor=3)),
    )
    optimizers = [
        oneembedding.Optimizer(torch.optim.Adam(module.parameters(), lr=0.1), [module])
        for module in modules
    ]
    given = batches()
    for ids, following in zip(given, [*given[1:], None], strict=True):
        outputs = []
        for module, optimizer in zip(modules, optimizers, strict=True):
            rows = module(ids)
            if prefetches and following is not None:
                module.prefetch(following)
            rows.sin().sum().backward()
            optimizer.step()
            outputs.append(rows.detach())
        assert torch.equal(*outputs)
    assert (tmp_path / "0-1" / "LOCK").is_file()
    stats = modules[0].group.usage.storage()
    assert stats.evicted > 1000 < stats.reads
    assert (stats.prefetched > 0) == prefetches


def test_snapshots_of_rows_on_ssd_load_anywhere(tmp_path: Path) -> None:
    adam = td.Adam(lr=0.1)
    module = on_ssd(tmp_path / "ssd")
    module.set_optimizer(adam)
    for ids in batches()[:6]:
        module(ids).sin().sum().backward()
        module.optimizer.step()
    module.save_snapshot("last")
    in_memory = embedding(
        2, DIM, store_options=store(tmp_path / "ssd", 10**6, size_factor=3), optimizer=adam
    )
    in_memory.load_snapshot("last")
    module(batches()[7]).sum().backward()
    module.optimizer.step()
    module.load_snapshot("last")
    on_other = on_ssd([str(tmp_path / "ssd" / "other")])
    on_other.set_optimizer(adam)
    (tmp_path / "ssd" / "other" / "snapshots").symlink_to(tmp_path / "ssd" / "snapshots")
    on_other.load_snapshot("last")
    for ids in batches()[6:9]:
        outputs = []
        for of in (module, in_memory, on_other):
            rows = of(ids)
            rows.sin().sum().backward()
            of.optimizer.step()
            outputs.append(rows.detach())
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])


def test_a_snapshot_of_a_store_with_room_for_millions_is_loaded_exactly(tmp_path: Path) -> None:
    make = oneembedding.make_cached_ssd_store_options
    options = make(1, tmp_path, size_factor=3, disk="4GB", segment=1 << 16)
    module = embedding(1, store_options=options, optimizer=td.Adam(lr=0.1))
    rows = module(torch.arange(9)).detach()
    module.save_snapshot("last")
    report = module.load_snapshot("last")
    assert report.tables["table_0"].exact
    assert torch.equal(module(torch.arange(9)), rows)


def test_files_of_a_rank_are_where_its_path_says(tmp_path: Path) -> None:
    first = on_ssd([str(tmp_path / "mine")])
    first.set_optimizer(td.Adam(lr=0.1))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine" / "LOCK").is_file()
    with pytest.raises(RuntimeError, match="is in use by process"):
        on_ssd([str(tmp_path / "mine")]).set_optimizer(td.Adam(lr=0.1))


def test_the_optimizer_comes_before_the_first_row(tmp_path: Path) -> None:
    module = on_ssd(tmp_path)
    ids = torch.tensor([[1, 2]])
    for call, given in (
        (module, ids),
        (module.prefetch, ids),
        (module.load_snapshot, "a"),
    ):
        with pytest.raises(RuntimeError, match="which is not set yet: wrap the optimizer"):
            call(given)
    assert list(tmp_path.iterdir()) == []
    module.set_optimizer(td.SGD(lr=1.0))
    module(ids).sum().backward()
    module.optimizer.step()
    before = content(module)
    with pytest.raises(RuntimeError, match="set_optimizer: it has storage"):
        module.set_optimizer(td.Adam(lr=0.1))
    assert before.keys() == {(0, 1), (1, 2)}
    assert all(torch.equal(row, before[key]) for key, row in content(module).items())


def test_frozen_embeddings_have_the_rows_on_ssd(tmp_path: Path) -> None:
    module = on_ssd(tmp_path)
    optimizer = oneembedding.Optimizer(torch.optim.Adam(module.parameters(), lr=0.1), [module])
    for step in range(6):
        module(torch.arange(2000).reshape(1000, 2) + 1500 * step).square().sum().backward()
        optimizer.step()
    stats = module.group.usage.storage()
    assert stats is not None
    assert stats.evicted > 0
    ids = torch.arange(12_000).reshape(6000, 2)
    assert torch.equal(td.freeze(module)(ids), module.eval()(ids))
