"""Vectors as files, and the recall of an approximate search over them."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from seeding import seeded

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("files of other libraries")


def model_with(count: int, dim: int = 16) -> td.DynamicEmbedding:
    items = td.DynamicEmbedding(dim, name="items", optimizer=td.SGD(lr=0.1))
    centers = torch.randn(20, dim, generator=seeded(1))
    rows = centers[torch.arange(count) % 20] + 0.3 * torch.randn(count, dim, generator=seeded(2))
    items.group.insert_or_assign(0, torch.arange(count) * 11 - 500, rows)
    return items


def test_arrays_have_the_rows_of_their_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_dynemb.retrieval.vectors._ROWS_AT_ONCE", 64)
    items = model_with(300)
    items.group.erase(0, torch.tensor([-500]))
    path = td.export_vectors(torch.nn.Sequential(items), "items", tmp_path / "vectors")
    ids = torch.from_numpy(numpy.load(path / "ids.npy"))
    assert sorted(ids.tolist()) == [11 * i - 500 for i in range(1, 300)]
    vectors = torch.from_numpy(numpy.load(path / "vectors.npy"))
    assert torch.equal(vectors, items.group.read(0, ids))


def test_an_index_of_faiss_finds_most_of_the_exact_results(tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    items = model_with(2000)
    path = td.export_vectors(
        items, "items", tmp_path / "items.faiss", format="faiss", index="IVF16,Flat"
    )
    index = faiss.read_index(str(path))
    query = torch.randn(20, 16, generator=seeded(3))
    exact = td.top_k(query, items, 10).ids
    for probed, least in ((4, 0.8), (16, 1.0)):
        index.nprobe = probed
        found = torch.from_numpy(index.search(query.numpy(), 10)[1])
        recall = (found[:, :, None] == exact[:, None, :]).any(2).float().mean()
        assert float(recall) >= least
