"""Rows in host memory beneath a cache in the memory of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_groups import emulated_cuda
from small_embeddings import content, embedding

import torch_dynemb as td
from torch_dynemb import oneembedding

pytestmark = pytest.mark.own_device

IDS = torch.arange(400)


def test_rows_beneath_a_cache_are_those_in_hbm(tmp_path: Path) -> None:
    in_hbm = oneembedding.make_device_mem_store_options(tmp_path, 300, size_factor=3)
    cached = oneembedding.make_cached_host_mem_store_options(1, tmp_path, 300, size_factor=3)
    assert cached.storage(0, 1) == td.HostStore(cache=1 << 20)
    results = []
    with emulated_cuda():
        for options in (in_hbm, cached):
            module = embedding(1, store_options=options, optimizer=td.Adam(lr=0.1))
            for step in range(4):
                module(IDS[50 * step : 50 * step + 200, None]).sin().sum().backward()
                module.prefetch(IDS[50 * step + 200 :, None])
                module.optimizer.step()
            results.append((module, content(module)))
        (_, plain), (module, tiered) = results
        assert plain.keys() == tiered.keys()
        assert all(torch.equal(plain[key], tiered[key]) for key in plain)
        stats = module.group.usage.storage()
        assert stats is not None
        assert min(stats.hits, stats.misses, stats.cached) > 0


def test_an_optimizer_comes_before_rows_beneath_a_cache() -> None:
    options = oneembedding.make_cached_host_mem_store_options(1, "nowhere", 300)
    with (
        emulated_cuda(),
        pytest.raises(RuntimeError, match="rows beneath a cache are stored with the state of"),
    ):
        embedding(store_options=options)(torch.arange(3)[None])
