"""``torch_dynemb.oneembedding``: options, embeddings, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from refusing import Row
from small_embeddings import UNIFORM, embedding, store
from torch import nn

import torch_dynemb as td
from torch_dynemb import oneembedding

device_mem = oneembedding.make_device_mem_store_options
host_mem = oneembedding.make_cached_host_mem_store_options
ssd = oneembedding.make_cached_ssd_store_options
IDS = torch.arange(3)


def refused(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    module = embedding(1)
    return oneembedding.Optimizer(kind(module.parameters(), **options), [module])


ROWS: list[Row] = [
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
    (lambda: refused(torch.optim.RMSprop), TypeError, "RMSprop has no counterpart for rows"),
    (
        lambda: refused(torch.optim.SGD, lr=1, momentum=0.5, dampening=0.1),
        ValueError,
        "dampening is 0.1, but rows can only follow 0",
    ),
    (lambda: refused(torch.optim.SGD, lr=1, maximize=True), ValueError, "maximize is True"),
    (lambda: refused(torch.optim.Adagrad, lr_decay=0.5), ValueError, "lr_decay is 0.5"),
    (lambda: refused(oneembedding.Ftrl, lr_power=-0.3), ValueError, "lr_power is -0.3"),
    (lambda: refused(oneembedding.Ftrl, lr=0), ValueError, "lr is 0, expected more than 0"),
    (lambda: refused(oneembedding.Ftrl, beta=-1), ValueError, "beta is -1, expected at least"),
    (
        lambda: refused(torch.optim.Adam, amsgrad=True),
        ValueError,
        r"size_factor is 3, which is 12 elements for a row of 4 columns, but with AMSGrad it "
        r"takes 16: give the store options size_factor=4 or storage_dim=16",
    ),
    (
        lambda: refused(oneembedding.SmartDecayAdam),
        ValueError,
        r"with SmartDecayAdam it takes 13: give the store options storage_dim=13",
    ),
    (lambda: oneembedding.Optimizer(td.SGD(lr=1), []), TypeError, "optimizer is a SGD, expected"),
    (
        lambda: oneembedding.Optimizer(torch.optim.SGD([nn.Parameter(IDS.float())]), []),
        TypeError,
        r"embeddings is \[\], expected a list",
    ),
    (
        lambda: oneembedding.Optimizer(
            torch.optim.SGD([nn.Parameter(IDS.float())]), [embedding(1)]
        ),
        ValueError,
        "the parameter of embedding 'small' is not in the optimizer",
    ),
    (
        lambda: embedding(1)(torch.tensor([1], dtype=torch.int32)),
        TypeError,
        r"expected a dense tensor of torch\.int64",
    ),
]
