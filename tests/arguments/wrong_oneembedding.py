"""``torch_dynemb.oneembedding``: options, embeddings, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from refusing import Row, raising
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
    *raising(
        TypeError,
        (lambda: device_mem(3, 10), "persistent_path is 3, expected a path, or a list"),
        (lambda: device_mem(["a", 1], 10), r"persistent_path is \['a', 1\]"),
        (lambda: device_mem("a", None), "capacity is None, expected int"),
        (lambda: device_mem("a", 1.5), "capacity is 1.5"),
        (lambda: ssd(1, 3), "persistent_path is 3"),
        (lambda: ssd(1, "a", host_cache_budget_mb=1.5), "host_cache_budget_mb is 1.5"),
        (lambda: oneembedding.make_table_options(3), "param is 3, expected an init"),
        (lambda: oneembedding.make_table([UNIFORM]), r"param\[0\] is Uniform"),
        (lambda: oneembedding.make_column_options(3), "initializer is 3"),
        (lambda: embedding(name=3), "name is 3"),
        (lambda: embedding(dtype=torch.float64), "dtype is torch.float64, expected"),
        (lambda: embedding(key_type=torch.int8), "key_type is torch.int8, expected"),
        (lambda: embedding(tables=UNIFORM), "tables is Uniform"),
        (lambda: embedding(tables=[UNIFORM]), r"tables\[0\] is Uniform"),
        (lambda: embedding(tables=[]), r"tables is \[\]"),
        (lambda: embedding(store_options={}), r"store_options is {}, expected one such"),
        (lambda: embedding(default_initializer=3), "default_initializer is 3"),
        (lambda: refused(torch.optim.Adamax), "Adamax has no counterpart for rows"),
        (lambda: oneembedding.Optimizer(td.SGD(lr=1), []), "optimizer is a SGD, expected"),
        (
            lambda: oneembedding.Optimizer(torch.optim.SGD([nn.Parameter(IDS.float())]), []),
            r"embeddings is \[\], expected a list",
        ),
        (
            lambda: embedding(1)(torch.tensor([1], dtype=torch.int32)),
            r"expected a dense tensor of torch\.int64",
        ),
    ),
    *raising(
        ValueError,
        (lambda: device_mem([], 10), "persistent_path is empty"),
        (lambda: device_mem("a", 0), "capacity is 0, expected at least 1"),
        (lambda: device_mem("a", 10, size_factor=0), "size_factor is 0"),
        (lambda: device_mem("a", 10, storage_dim=0), "storage_dim is 0, expected at"),
        (
            lambda: device_mem("a", 10, physical_block_size=1024),
            r"physical_block_size is 1024, expected one of \(512, 4096\)",
        ),
        (lambda: host_mem(0, "a", 10), "cache_budget_mb is 0, expected at least 1"),
        (lambda: host_mem(1, "a", 0), "capacity is 0"),
        (lambda: ssd(0, "a"), "cache_budget_mb and host_cache_budget_mb are 0"),
        (lambda: ssd(-1, "a"), "make_cached_ssd_store_options: cache_budget_mb is -1"),
        (lambda: ssd(1, "a", capacity=0), "capacity is 0, expected at least 1"),
        (lambda: ssd(1, "a", segment=5), "segment is 5, expected a multiple of 4096"),
        (
            lambda: ssd(1, "a", disk="1MB"),
            r"disk is '1MB', expected at least 4 segments of segment=67108864, of which two are "
            "kept free for garbage collection: give disk=268435456 or more, or segment=249856 or "
            "less",
        ),
        (lambda: oneembedding.make_table_options([]), "param is empty"),
        (lambda: oneembedding.make_table(UNIFORM, capacity=0), "capacity is 0"),
        (lambda: embedding(dims=0), "embedding_dim is 0"),
        (lambda: embedding(dims=[]), "embedding_dim is empty"),
        (lambda: embedding(dims=[4, 0]), r"embedding_dim\[1\] is 0"),
        (lambda: embedding(padding_idx=2**63), "padding_idx is 9223372036854775808"),
        (
            lambda: embedding(padding_idx=-1, key_type=torch.uint32),
            "padding_idx is -1, expected at least 0",
        ),
        (lambda: embedding(seed=-1), "seed is -1"),
        (lambda: embedding(path=["a", "b"]), "has 2 paths, but there are 1 ranks"),
        (
            lambda: embedding(1, store_options=store(), optimizer=td.Adam(lr=0.1)),
            "size_factor is 1, .* with Adam it takes 12: give the store options size_factor=3",
        ),
        (
            lambda: refused(torch.optim.RMSprop, centered=True),
            "centered is True, but rows only support False",
        ),
        (
            lambda: refused(torch.optim.SGD, lr=1, momentum=0.5, dampening=1.5),
            "dampening is 1.5, expected a number in",
        ),
        (lambda: refused(oneembedding.Ftrl, lr_power=-0.3), "lr_power is -0.3"),
        (lambda: refused(oneembedding.Ftrl, lr=0), "lr is 0, expected more than 0"),
        (lambda: refused(oneembedding.Ftrl, beta=-1), "beta is -1, expected at least"),
        (
            lambda: refused(torch.optim.Adam, amsgrad=True),
            r"size_factor is 3, which is 12 elements for a row of 4 columns, but with AMSGrad it "
            r"takes 16: give the store options size_factor=4 or storage_dim=16",
        ),
        (
            lambda: refused(oneembedding.SmartDecayAdam),
            r"with SmartDecayAdam it takes 13: give the store options storage_dim=13",
        ),
        (
            lambda: oneembedding.Optimizer(
                torch.optim.SGD([nn.Parameter(IDS.float())]), [embedding(1)]
            ),
            "the parameter of embedding 'small' is not in the optimizer",
        ),
    ),
]
