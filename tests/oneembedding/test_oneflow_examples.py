"""The examples of OneFlow's documentation of OneEmbedding, with its names and arguments.

What is different in them: ``import torch as flow``, ``oneembedding`` for ``flow.one_embedding``, a
loop for ``flow.nn.Graph``, and a ``Sequential`` for ``flow.nn.FusedMLP``.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as flow

from torch_dynemb import oneembedding

pytestmark = pytest.mark.cpu_only("examples, which name no device")

TABLE_SIZES = [39884407, 39043, 17289]
SCALES = np.sqrt(1 / np.array(TABLE_SIZES))


def mlp_of(in_features: int) -> flow.nn.Module:
    widths = [in_features, 64, 16]
    layers: list[flow.nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [flow.nn.Linear(inputs, outputs), flow.nn.ReLU()]
    return flow.nn.Sequential(*layers, flow.nn.Linear(16, 1))


def random_ids(tables: int) -> flow.Tensor:
    ids = np.random.default_rng(0).integers(0, 1000, (100, tables), dtype=np.int64)
    return flow.tensor(ids, requires_grad=False)


def train(embedding: Any, columns: int) -> None:
    """A graph with two SGD optimizers in the documentation."""
    flow.manual_seed(0)
    tables = embedding.num_tables
    mlp = mlp_of(tables * columns)
    of_rows = flow.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.0)
    optimizers = [
        oneembedding.Optimizer(of_rows, embeddings=[embedding]),
        flow.optim.SGD(mlp.parameters(), lr=0.1, momentum=0.0),
    ]
    ids = random_ids(tables)
    losses = []
    for _ in range(3):
        rows = embedding(ids)
        loss = mlp(flow.reshape(rows, (-1, tables * columns))).sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    assert [len(set(ids[:, t].tolist())) for t in range(tables)] == list(embedding.sizes().values())


def test_multi_table_embedding(tmp_path: Path) -> None:
    embedding_size = 128
    tables = [
        oneembedding.make_table_options(
            oneembedding.make_uniform_initializer(low=-scale, high=scale)
        )
        for scale in SCALES
    ]
    store_options = oneembedding.make_cached_host_mem_store_options(
        cache_budget_mb=8192, persistent_path=str(tmp_path), capacity=sum(TABLE_SIZES)
    )
    embedding = oneembedding.MultiTableEmbedding(
        name="my_embedding",
        embedding_dim=embedding_size,
        dtype=flow.float,
        key_type=flow.int64,
        tables=tables,
        store_options=store_options,
    )
    embedding.to("cpu")
    train(embedding, embedding_size)
    embedding.save_snapshot("my_snapshot1")
    embedding.load_snapshot("my_snapshot1")
    with oneembedding.make_persistent_table_reader(
        [str(tmp_path)], "my_snapshot1", flow.int64, flow.float, embedding_size
    ) as reader:
        read = sum(len(keys) for keys, values in reader)
    assert read == sum(embedding.sizes().values())


def test_multi_table_multi_column_embedding(tmp_path: Path) -> None:
    embedding_size_list = [10, 1]
    tables = [
        oneembedding.make_table_options(
            [
                oneembedding.make_column_options(
                    oneembedding.make_uniform_initializer(low=-scale, high=scale)
                ),
                oneembedding.make_column_options(
                    oneembedding.make_normal_initializer(mean=0, std=scale)
                ),
            ]
        )
        for scale in SCALES
    ]
    store_options = oneembedding.make_cached_ssd_store_options(
        cache_budget_mb=8192, persistent_path=str(tmp_path), capacity=sum(TABLE_SIZES)
    )
    embedding = oneembedding.MultiTableMultiColumnEmbedding(
        name="my_embedding",
        embedding_dim=embedding_size_list,
        dtype=flow.float,
        key_type=flow.int64,
        tables=tables,
        store_options=store_options,
    )
    train(embedding, sum(embedding_size_list))


def test_both_ways_to_name_a_table(tmp_path: Path) -> None:
    store_options = oneembedding.make_device_mem_store_options(str(tmp_path), 1000)
    initializer = oneembedding.make_trunc_normal_initializer(mean=0, std=0.01, a=-0.02, b=0.02)
    embedding_lookup = oneembedding.MultiTableEmbedding(
        "my_embedding",
        4,
        flow.float,
        flow.int64,
        [oneembedding.make_table(initializer) for _ in range(3)],
        store_options,
    )
    ids = flow.tensor([[488, 333, 220], [18, 568, 508]])
    by_column = embedding_lookup(ids)
    table_ids = flow.tensor([0, 1, 2, 0, 1, 2])
    by_number = embedding_lookup(ids.flatten(), table_ids)
    assert flow.equal(by_number, by_column.reshape(6, 4))
    assert list(embedding_lookup.sizes().values()) == [2, 2, 2]


@pytest.mark.parametrize("kind", [oneembedding.Ftrl, oneembedding.SmartDecayAdam])
def test_the_optimizers_it_adds(tmp_path: Path, kind: Any) -> None:
    embedding = oneembedding.MultiTableEmbedding(
        "my_embedding",
        4,
        flow.float,
        flow.int64,
        tables=None,
        store_options=oneembedding.make_device_mem_store_options(
            str(tmp_path), 1000, size_factor=4
        ),
        default_initializer=oneembedding.make_constant_initializer(value=1),
        padding_idx=0,
    )
    net = flow.nn.Sequential(embedding, flow.nn.Linear(4, 1))
    adam = oneembedding.Optimizer(kind(net.parameters(), lr=1e-1), [embedding])
    for _ in range(3):
        net(flow.arange(5)).square().sum().backward()
        adam.step()
        adam.zero_grad()
    rows = embedding(flow.arange(5))
    assert flow.equal(rows[0], flow.zeros(4))
    assert (rows[1:] != 1).all()
