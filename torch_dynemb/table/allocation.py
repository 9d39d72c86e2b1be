"""Makes the tensors of a table group, empty, in the reserved memory of a device."""

from __future__ import annotations

import hashlib
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_dynemb.initializers import InitData, Initializer
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    BUCKET_WORDS,
    CLOCK_HEAD,
    EVICTED_COLUMNS,
    HYPER_COLUMNS,
    MAX_LOAD_PERCENT,
    MAX_ROWS,
    META_COLUMNS,
    MIN_BUCKETS,
    ROW_CLOCK_EXTRA,
    SLAB_COLUMNS,
    TABLE_COLUMNS,
    Meta,
    Slab,
    Table,
)
from torch_dynemb.ops.pending import PendingGradients
from torch_dynemb.storage.address_space import ADDRESS_SPACE, address_limits
from torch_dynemb.table.config import ColumnShard

if TYPE_CHECKING:
    from torch_dynemb.policy.policy import Default
    from torch_dynemb.storage.memory import TableMemory
    from torch_dynemb.table.config import SlabConfig
    from torch_dynemb.table.group import TableGroup

# Exact counts of a table with a capacity: so many times the capacity, but at least so many ids.
_COUNTED_PER_ID = 64
_LEAST_COUNTED = 1 << 26
# Bytes of addresses that groups have taken.
_reserved: weakref.WeakKeyDictionary[TableGroup, int] = weakref.WeakKeyDictionary()


def allocate(group: TableGroup, memory: TableMemory) -> None:
    """Sets the tensors of a group. None of them ever changes its shape or address."""
    rows = _reserved_rows(group, memory)
    try:
        buckets = _describe_tables(group, rows, memory)
        _allocate_index(group, memory, rows, buckets)
        _allocate_rows(group, memory, rows)
        memory.bind(group, [], [])
    except BaseException:
        _reserved.pop(group, None)  # the error may keep the group for longer
        raise


def _free_share() -> int:
    """Bytes of addresses for a group that would take any number: 4 TB, or 10 GB after 1,000.

    A quarter of what is left at first where the process or the machine has a limit of its own.
    """
    groups = len(_reserved)
    share = (ADDRESS_SPACE - sum(_reserved.values())) // (4 * (groups + 8))
    return min([share, *(limit.left // (2 * (groups + 2)) for limit in address_limits())])


def _reserved_rows(group: TableGroup, memory: TableMemory) -> list[int]:
    """Rows to reserve by slab: what its tables may hold, or what would fill the memory.

    Addresses are cheap but not endless, so groups without a bound get fewer where many exist.
    """
    _reserved.pop(group, None)
    slabs = group.slab_configs
    tables = [sum(table.slab == slab for table in group.tables_config) for slab in slabs]
    of_row = [_addresses_of_row(group, s, n) for s, n in zip(slabs, tables, strict=True)]
    full = [memory.total_bytes() // _addresses_of_row(group, slab, 1) for slab in slabs]
    rows = [
        _slab_rows(group, slab, max(1, min(MAX_ROWS, n)))
        for slab, n in zip(slabs, full, strict=True)
    ]
    wanted = sum(n * size for n, size in zip(rows, of_row, strict=True))
    counters = len(group.layout.counter_tables)
    share = _free_share() * 3 // 4  # the rest is for counters
    if wanted > share:
        rows = [
            _slab_rows(group, s, max(1, n * share // wanted))
            for s, n in zip(slabs, rows, strict=True)
        ]
    taken = sum(n * size for n, size in zip(rows, of_row, strict=True))
    taken += counters * _region_buckets(_counted_ids(group, memory, rows)) * 8 * BUCKET_WORDS
    _reserved[group] = taken
    return rows


def _counted_ids(group: TableGroup, memory: TableMemory, rows: list[int]) -> int:
    """Ids that each counter table has room for."""
    if group.max_rows is not None:
        return 4 * max(rows)
    counters = max(len(group.layout.counter_tables), 1)
    most = min(memory.total_bytes() // 16, _free_share() // (8 * counters)) // BUCKET_WIDTH
    capacities = [group.capacity_bound(t) for t in group.layout.counter_tables]
    if capacities and None not in capacities:
        largest = max(capacity or 0 for capacity in capacities)
        most = min(most, max(_LEAST_COUNTED, _COUNTED_PER_ID * largest))
    return max(1, most)


def _addresses_of_row(group: TableGroup, slab: SlabConfig, tables: int) -> int:
    """Bytes of addresses that a row of a slab takes, whose ids may be of any of so many tables."""
    slots = 100 / MAX_LOAD_PERCENT
    index = 8 * (BUCKET_WORDS / BUCKET_WIDTH + len(group.layout.score_words)) * slots
    waiting = 2 * (3 * 8 + 4 * slab.dim) if group.split else 0
    return group.row_bytes(slab) + 8 + waiting + int(tables * index)


def _slab_rows(group: TableGroup, slab: SlabConfig, most: int) -> int:
    most = most if group.max_rows is None else group.max_rows
    bounds = [
        group.capacity_bound(t) for t, table in enumerate(group.tables_config) if table.slab == slab
    ]
    return most if None in bounds else min(most, sum(bound or 0 for bound in bounds))


def _region_buckets(ids: int) -> int:
    slots = -(-ids * 100 // MAX_LOAD_PERCENT)
    return max(MIN_BUCKETS, -(-slots // BUCKET_WIDTH // 64) * 64)


def _describe_tables(group: TableGroup, rows: list[int], memory: TableMemory) -> int:
    """Sets ``meta`` and ``init_data``; returns the number of buckets of all tables."""
    counted = group.layout.counter_tables
    meta = torch.zeros(
        len(group.tables_config) + len(counted),
        META_COLUMNS,
        dtype=torch.int64,
        device=torch.device("cpu"),
    )
    init = InitData()
    region_begin = 0
    for t, table in enumerate(group.tables_config):
        slab = group.slab_of(t)
        bound = group.capacity_bound(t)
        region = _region_buckets(rows[slab] if bound is None else min(bound, rows[slab]))
        row = meta[t]
        whole = table.shard or ColumnShard(table.name, table.embedding_dim, 0)
        row[Meta.SEED] = _table_seed(group.seed, whole.table)
        row[Meta.FIRST_COLUMN] = whole.first_column
        row[Meta.SLAB] = slab
        row[Meta.DIM] = table.embedding_dim
        row[Meta.HAS_PADDING] = int(table.padding_idx is not None)
        row[Meta.PADDING_ID] = table.padding_idx or 0
        row[Meta.INIT_BEGIN], row[Meta.INIT_COUNT] = init.add(
            table.initializer,
            whole.embedding_dim,
            range(whole.first_column, whole.first_column + table.embedding_dim),
        )
        row[Meta.DEFAULT_BEGIN], row[Meta.DEFAULT_COUNT] = _default_records(
            init, table.eval_default, table.embedding_dim, row, whole
        )
        refused = table.eval_default if table.policy.refused is None else table.policy.refused
        row[Meta.REFUSED_BEGIN], row[Meta.REFUSED_COUNT] = _default_records(
            init, refused, table.embedding_dim, row, whole
        )
        row[Meta.REGION_BEGIN] = region_begin
        row[Meta.REGION_BUCKETS] = region
        region_begin += region
    # counters lie in the same index, and take no rows
    region = _region_buckets(_counted_ids(group, memory, rows)) if counted else 0
    for number, t in enumerate(counted):
        row = meta[len(group.tables_config) + number]
        row[:] = meta[t]
        row[Meta.SEED] = _table_seed(group.seed, f"counts of {group.tables_config[t].name}")
        row[Meta.REGION_BEGIN] = region_begin
        row[Meta.REGION_BUCKETS] = region
        row[Meta.UNSCORED] = 1
        region_begin += region
    group.meta = meta.to(memory.device)
    # the tables that have rows; the same tensor if all have: a view would be an input of its own
    group.row_meta = group.meta[: len(group.tables_config)] if counted else group.meta
    group.init_data = init.tensor().to(memory.device)
    group.policy = group.layout.policy_tensor().to(memory.device)
    return region_begin


def _default_records(
    init: InitData, default: Default, dim: int, row: Tensor, whole: ColumnShard
) -> tuple[int | Tensor, int | Tensor]:
    if isinstance(default, Tensor):
        return init.add_vector(default)
    if isinstance(default, Initializer):
        first = whole.first_column
        return init.add(default, whole.embedding_dim, range(first, first + dim))
    if default == "zeros":
        return init.add_vector(torch.zeros(dim))
    return row[Meta.INIT_BEGIN], row[Meta.INIT_COUNT]


def _allocate_index(group: TableGroup, memory: TableMemory, rows: list[int], buckets: int) -> None:
    """The tensors that are changed in the forward only."""
    count, slabs = group.meta.shape[0], len(group.slab_configs)
    words = len(group.layout.score_words)

    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=memory.device)

    def reserve(*size: int) -> Tensor:
        return memory.reserve(size, torch.int64, huge_pages=False)

    group.buckets = reserve(buckets, BUCKET_WORDS)
    group.scores = reserve(buckets if words > 0 else 0, BUCKET_WIDTH * max(words, 1))
    group.tables = zeros(count, TABLE_COLUMNS)
    group.tables[:, Table.BUCKET_COUNT] = MIN_BUCKETS
    group.slabs = zeros(slabs, SLAB_COLUMNS)
    for s, slab in enumerate(group.slab_configs):
        group.slabs[s, Slab.ROW_BYTES] = group.row_bytes(slab)
    group.free_rows = reserve(slabs, max(rows))
    group.clock = zeros(CLOCK_HEAD + count)
    cells = group.layout.sketch_cells
    group.sketch = torch.zeros(cells, dtype=torch.int32, device=memory.device)
    group.evicted = zeros(1, EVICTED_COLUMNS)
    group.one_bag = zeros(0)


def _allocate_rows(group: TableGroup, memory: TableMemory, rows: list[int]) -> None:
    """The tensors that are changed in the backward only."""

    def reserve(slab: int, *columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return memory.reserve((rows[slab], *columns), dtype, huge_pages=True)

    config = group.optimizer_config
    slabs = list(enumerate(group.slab_configs))
    group.weights = [reserve(s, slab.dim, dtype=slab.dtype) for s, slab in slabs]
    group.generations = [reserve(s, dtype=torch.int32) for s, _ in slabs]
    group.state = []
    for tensor in () if config is None else config.state:
        for s, slab in slabs:
            columns = () if tensor.per_row else (tensor.columns(slab.dim),)
            group.state.append(reserve(s, *columns, dtype=tensor.dtype))
    group.pending = []
    if group.split:
        # twice the rows: what has been merged, and one more lookup of all of them
        room = [(2 * rows[s], slab.dim) for s, slab in slabs]
        handles, ids, tables = (
            [memory.reserve((n,), torch.int64, huge_pages=True) for n, _ in room] for _ in range(3)
        )
        gradients = [memory.reserve(size, torch.float32, huge_pages=True) for size in room]
        counts = torch.zeros(len(slabs), 2, dtype=torch.int64, device=memory.device)
        group.pending = PendingGradients(handles, ids, tables, gradients, counts).flat()
    count = len(group.tables_config)
    group.row_clock = torch.zeros(count + ROW_CLOCK_EXTRA, dtype=torch.int64, device=memory.device)
    hyper = [0.0] * HYPER_COLUMNS if config is None else config.hyper_row()
    group.hyper = torch.tensor([hyper] * count, dtype=torch.float64, device=memory.device)


def _table_seed(base: int, name: str) -> int:
    digest = hashlib.sha256(f"{base}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


__all__ = ["allocate"]
