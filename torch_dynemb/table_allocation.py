"""Makes the tensors of a table group, empty, in the reserved memory of a device."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_dynemb.initializers import InitData
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    BUCKET_WORDS,
    HYPER_COLUMNS,
    MAX_LOAD_PERCENT,
    MAX_ROWS,
    META_COLUMNS,
    ROW_CLOCK_EXTRA,
    SLAB_COLUMNS,
    TABLE_COLUMNS,
    Meta,
    Slab,
    Table,
)

if TYPE_CHECKING:
    from torch_dynemb.table import TableGroup
    from torch_dynemb.table_memory import TableMemory

_MIN_BUCKETS = 64 // BUCKET_WIDTH


def allocate(group: TableGroup, memory: TableMemory) -> None:
    """Sets the tensors of a group. None of them ever changes its shape or address."""
    rows = [
        max(1, min(MAX_ROWS, memory.total_bytes() // (4 * dim)))
        if group.max_rows is None
        else group.max_rows
        for dim in group.dims
    ]
    buckets = _describe_tables(group, rows, memory.device)
    _allocate_index(group, memory, rows, buckets)
    _allocate_rows(group, memory, rows)
    memory.bind(group, [], [])


def _describe_tables(group: TableGroup, rows: list[int], device: torch.device) -> int:
    """Sets ``meta`` and ``init_data``; returns the number of buckets of all tables."""
    meta = torch.zeros(
        len(group.tables_config), META_COLUMNS, dtype=torch.int64, device=torch.device("cpu")
    )
    init = InitData()
    region_begin = 0
    for t, table in enumerate(group.tables_config):
        slab = group.dims.index(table.embedding_dim)
        slots = -(-rows[slab] * 100 // MAX_LOAD_PERCENT)
        region = max(_MIN_BUCKETS, -(-slots // BUCKET_WIDTH // 64) * 64)
        row = meta[t]
        row[Meta.SEED] = _table_seed(group.seed, table.name)
        row[Meta.SLAB] = slab
        row[Meta.DIM] = table.embedding_dim
        row[Meta.HAS_PADDING] = int(table.padding_idx is not None)
        row[Meta.PADDING_ID] = table.padding_idx or 0
        row[Meta.INIT_BEGIN], row[Meta.INIT_COUNT] = init.add(
            table.initializer, table.embedding_dim
        )
        default = table.eval_default
        if isinstance(default, Tensor):
            row[Meta.DEFAULT_BEGIN], row[Meta.DEFAULT_COUNT] = init.add_vector(default)
        elif default == "zeros":
            zeros = torch.zeros(table.embedding_dim)
            row[Meta.DEFAULT_BEGIN], row[Meta.DEFAULT_COUNT] = init.add_vector(zeros)
        else:
            row[Meta.DEFAULT_BEGIN] = row[Meta.INIT_BEGIN]
            row[Meta.DEFAULT_COUNT] = row[Meta.INIT_COUNT]
        row[Meta.REGION_BEGIN] = region_begin
        row[Meta.REGION_BUCKETS] = region
        region_begin += region
    group.meta = meta.to(device)
    group.init_data = init.tensor().to(device)
    return region_begin


def _allocate_index(group: TableGroup, memory: TableMemory, rows: list[int], buckets: int) -> None:
    """The tensors that are changed in the forward only."""
    count, slabs = len(group.tables_config), len(group.dims)

    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=memory.device)

    def reserve(*size: int) -> Tensor:
        return memory.reserve(size, torch.int64, huge_pages=False)

    group.buckets = reserve(buckets, BUCKET_WORDS)
    group.scores = reserve(buckets if group.score != "none" else 0, BUCKET_WIDTH)
    group.tables = zeros(count, TABLE_COLUMNS)
    group.tables[:, Table.BUCKET_COUNT] = _MIN_BUCKETS
    group.slabs = zeros(slabs, SLAB_COLUMNS)
    for s, dim in enumerate(group.dims):
        group.slabs[s, Slab.ROW_BYTES] = group.row_bytes(dim)
    group.free_rows = reserve(slabs, max(rows))
    group.clock = zeros(1)


def _allocate_rows(group: TableGroup, memory: TableMemory, rows: list[int]) -> None:
    """The tensors that are changed in the backward only."""

    def reserve(slab: int, *columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return memory.reserve((rows[slab], *columns), dtype, huge_pages=True)

    config = group.optimizer_config
    group.weights = [reserve(s, dim) for s, dim in enumerate(group.dims)]
    group.generations = [reserve(s, dtype=torch.int32) for s in range(len(group.dims))]
    group.state = []
    for tensor in () if config is None else config.state:
        for s, dim in enumerate(group.dims):
            group.state.append(reserve(s) if tensor.per_row else reserve(s, dim))
    count = len(group.tables_config)
    group.row_clock = torch.zeros(count + ROW_CLOCK_EXTRA, dtype=torch.int64, device=memory.device)
    hyper = [0.0] * HYPER_COLUMNS if config is None else config.hyper_row()
    group.hyper = torch.tensor([hyper] * count, dtype=torch.float64, device=memory.device)


def _table_seed(base: int, name: str) -> int:
    digest = hashlib.sha256(f"{base}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


__all__ = ["allocate"]
