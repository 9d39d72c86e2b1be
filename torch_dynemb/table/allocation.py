"""Allocation of the tensors of a table group, empty, in the reserved memory of a device."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
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
    SLOT_COLUMNS,
    TABLE_COLUMNS,
    TIER_COLUMNS,
    Meta,
    Slab,
    Table,
)
from torch_dynemb.ops.pending import PendingGradients
from torch_dynemb.ops.tensors import IndexTensors, RowTensors, TierTensors
from torch_dynemb.policy.policy import Default
from torch_dynemb.process.forked import watch
from torch_dynemb.storage.address_space import ADDRESS_SPACE, address_limits
from torch_dynemb.storage.host import HostMemory
from torch_dynemb.storage.memory import TableMemory
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.storage.tiers import ExternalStore, HostStore, SSDStore
from torch_dynemb.storage.tiers.cache_size import CacheSize
from torch_dynemb.storage.tiers.configs import CachedStorage
from torch_dynemb.storage.tiers.host_tiers import HostTiers
from torch_dynemb.storage.tiers.opening import open_device_tiers, open_tiers
from torch_dynemb.storage.tiers.store_tiers import StoreTiers
from torch_dynemb.storage.tiers.tiers import Tiers
from torch_dynemb.table.clock import set_time
from torch_dynemb.table.config import ColumnShard, SlabConfig
from torch_dynemb.table.expiry import new_floors
from torch_dynemb.table.group_config import SLOT_BYTES, TIERED_ROW_BYTES, GroupConfig
from torch_dynemb.table.host_state import EvictionRecords, HostState
from torch_dynemb.table.tables import Tables

# Ids with exact counts in a table with a capacity: a multiple of the capacity, and a minimum.
_COUNTED_PER_ID = 64
_LEAST_COUNTED = 1 << 26
# Slots are numbered with 32 bits.
_MOST_TIERED_ROWS = (1 << 31) - 2
# Bytes of addresses that each group has reserved.
_reserved: weakref.WeakKeyDictionary[HostState, int] = weakref.WeakKeyDictionary()


def allocate(config: GroupConfig, memory: TableMemory) -> Tables:
    """Allocate empty tables. None of their tensors ever changes its shape or address.

    Raises:
        RuntimeError: too little memory, or too few addresses.
    """
    floors = new_floors(config, memory.device)
    host = HostState(rejected=[0] * len(config.tables), expiry_floors=floors)
    rows, _reserved[host] = _reserved_rows(config, memory)
    try:
        constants = _describe_tables(config, memory, rows)
        index = _index_tensors(config, memory, rows, constants)
        slots = _cached_slots(config, memory, rows)
        row_tensors = _row_tensors(config, memory, rows, slots, constants)
        memory.bind(index, row_tensors)
        if isinstance(config.storage, HostStore) and not any(slots):
            memory.split_rows(index, config.split_slabs, config.storage)
        tiers = _tiers(config, memory, rows, slots, index, row_tensors)
    except BaseException:
        del _reserved[host]  # the error's traceback may keep `host` alive
        raise
    one_bag = torch.zeros(0, dtype=torch.int64, device=memory.device)
    tables = Tables(config, memory, index, row_tensors, host, EvictionRecords(), one_bag, tiers)
    mark_static(tables.tensors())
    watch(host)
    if config.keeps_time:
        set_time(tables, int(time.time()))
    return tables


def _free_share() -> int:
    """Return the bytes of addresses for a group without a bound: 4 TB, or 10 GB after 1,000 groups.

    A limit of the process or the machine lowers it: at first to a quarter of what is left.
    """
    groups = len(_reserved)
    share = (ADDRESS_SPACE - sum(_reserved.values())) // (4 * (groups + 8))
    return min([share, *(limit.left // (2 * (groups + 2)) for limit in address_limits())])


def _reserved_rows(config: GroupConfig, memory: TableMemory) -> tuple[list[int], int]:
    """Return the rows to reserve by slab, and their bytes.

    A slab gets the rows that its tables or the memory can have at most. Addresses are cheap but
    limited, so groups without a bound get fewer if many groups exist.
    """
    slabs = config.slabs
    tables = [sum(table.slab == slab for table in config.tables) for slab in slabs]
    of_row = [_addresses_of_row(config, s, n) for s, n in zip(slabs, tables, strict=True)]
    for slab in config.split_slabs if _caches(config, memory) else ():
        of_row[slab] += config.row_bytes(slabs[slab]) + SLOT_BYTES  # as many slots as rows
    full = [_most_rows(config, memory, slab) for slab in slabs]
    rows = [
        _slab_rows(config, slab, max(1, min(MAX_ROWS, n)))
        for slab, n in zip(slabs, full, strict=True)
    ]
    wanted = sum(n * size for n, size in zip(rows, of_row, strict=True))
    counters = len(config.layout.counter_tables)
    share = _free_share() * 3 // 4  # the rest is for counters
    if wanted > share:
        rows = [
            _slab_rows(config, s, max(1, n * share // wanted))
            for s, n in zip(slabs, rows, strict=True)
        ]
    taken = sum(n * size for n, size in zip(rows, of_row, strict=True))
    taken += counters * _region_buckets(_counted_ids(config, memory, rows)) * 8 * BUCKET_WORDS
    return rows, taken


def _most_rows(config: GroupConfig, memory: TableMemory, slab: SlabConfig) -> int:
    """Return the number of rows that fill the memory of the device, or twice the store.

    So a store is full before the index is, and its error says so.
    """
    storage = config.storage
    if not slab.tiered:
        total = memory.total_bytes()
        if isinstance(storage, HostStore):
            total = memory.total_bytes_with(storage)
        most = total // _addresses_of_row(config, slab, 1)
        return min(most, _MOST_TIERED_ROWS // 2) if _caches(config, memory) else most
    if not isinstance(storage, SSDStore):
        return _MOST_TIERED_ROWS
    record = ops.record_bytes(config.row_bytes(slab) - 4)
    return min(_MOST_TIERED_ROWS, 2 * storage.total_bytes() // record)


def _caches(config: GroupConfig, memory: TableMemory) -> bool:
    return config.caches_hosted and memory.has_cache


def _stores_below(config: GroupConfig, memory: TableMemory) -> bool:
    """Return whether a GPU has caches above a store."""
    return isinstance(config.storage, SSDStore | ExternalStore) and memory.has_cache


def _cached_slots(config: GroupConfig, memory: TableMemory, rows: list[int]) -> list[int]:
    """Return the most slots of a cache in HBM, by slab; 0: none.

    Raises:
        ValueError: a cache is too small for one row.
    """
    if _stores_below(config, memory):
        # a step may need more than the cache should have, up to all memory
        most = memory.total_bytes()
        return [
            max(1, min(rows[s], most // (config.row_bytes(slab) + SLOT_BYTES))) * slab.tiered
            for s, slab in enumerate(config.slabs)
        ]
    if not _caches(config, memory):
        return [0] * len(rows)
    storage = config.storage
    assert isinstance(storage, HostStore)
    assert storage.cache_size is not None
    given = f"HostStore has cache={storage.cache!r}"
    return _shared_slots(config, rows, config.split_slabs, storage.cache_size, given)


def _shared_slots(
    config: GroupConfig, rows: list[int], cached: Sequence[int], size: CacheSize, given: str
) -> list[int]:
    """Divide the slots of a cache among slabs; others get 0.

    Args:
        given: the argument, for an error.

    Raises:
        ValueError: the cache is too small for one row.
    """
    slots = [0] * len(rows)
    slot_bytes = [config.row_bytes(slab) + SLOT_BYTES for slab in config.slabs]
    by_bytes = size.unit == "bytes"
    weights = {slab: rows[slab] * (slot_bytes[slab] if by_bytes else 1) for slab in cached}
    for slab in cached:
        share = weights[slab] / sum(weights.values())
        slots[slab] = size.most_slots(given, rows[slab], slot_bytes[slab], share)
    return slots


def _counted_ids(config: GroupConfig, memory: TableMemory, rows: list[int]) -> int:
    """Return the number of ids that each counter table is for."""
    if config.max_rows is not None:
        return 4 * max(rows)
    counters = max(len(config.layout.counter_tables), 1)
    most = min(memory.total_bytes() // 16, _free_share() // (8 * counters)) // BUCKET_WIDTH
    capacities = [config.capacity_bound(t) for t in config.layout.counter_tables]
    if capacities and None not in capacities:
        largest = max(capacity or 0 for capacity in capacities)
        most = min(most, max(_LEAST_COUNTED, _COUNTED_PER_ID * largest))
    return max(1, most)


def _addresses_of_row(config: GroupConfig, slab: SlabConfig, tables: int) -> int:
    """Return the bytes of addresses of a slab's row; its id may be in any of ``tables`` tables."""
    slots = 100 / MAX_LOAD_PERCENT
    index = 8 * (BUCKET_WORDS / BUCKET_WIDTH + len(config.layout.score_words)) * slots
    pending = 2 * (3 * 8 + 4 * slab.dim) if config.split else 0
    tiered = TIERED_ROW_BYTES + SLOT_BYTES if slab.tiered else 0
    return config.row_bytes(slab) + 8 + pending + int(tables * index) + tiered


def _slab_rows(config: GroupConfig, slab: SlabConfig, most: int) -> int:
    most = most if config.max_rows is None else config.max_rows
    bounds = [
        config.capacity_bound(t) for t, table in enumerate(config.tables) if table.slab == slab
    ]
    return most if None in bounds else min(most, sum(bound or 0 for bound in bounds))


def _region_buckets(ids: int) -> int:
    slots = -(-ids * 100 // MAX_LOAD_PERCENT)
    return max(MIN_BUCKETS, -(-slots // BUCKET_WIDTH // 64) * 64)


class _Constants(NamedTuple):
    """Constants of the tables for kernels, and the number of buckets of all tables."""

    meta: Tensor
    row_meta: Tensor
    init_data: Tensor
    buckets: int


def _describe_tables(config: GroupConfig, memory: TableMemory, rows: list[int]) -> _Constants:
    counted = config.layout.counter_tables
    meta = torch.zeros(
        len(config.tables) + len(counted),
        META_COLUMNS,
        dtype=torch.int64,
        device=torch.device("cpu"),
    )
    init = InitData()
    region_begin = 0
    for t, table in enumerate(config.tables):
        slab = config.slab_of(t)
        bound = config.capacity_bound(t)
        region = _region_buckets(rows[slab] if bound is None else min(bound, rows[slab]))
        row = meta[t]
        whole = table.shard or ColumnShard(table.name, table.embedding_dim, 0)
        row[Meta.SEED] = _table_seed(config.seed, whole.table)
        row[Meta.FIRST_COLUMN] = whole.first_column
        row[Meta.SLAB] = slab
        cached = slab in config.split_slabs and _caches(config, memory)
        row[Meta.TIERED] = int(table.slab.tiered or cached)
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
    # counter tables are in the same index, without rows
    region = _region_buckets(_counted_ids(config, memory, rows)) if counted else 0
    for number, t in enumerate(counted):
        row = meta[len(config.tables) + number]
        row[:] = meta[t]
        row[Meta.SEED] = _table_seed(config.seed, f"counts of {config.tables[t].name}")
        row[Meta.REGION_BEGIN] = region_begin
        row[Meta.REGION_BUCKETS] = region
        row[Meta.UNSCORED] = 1
        region_begin += region
    meta = meta.to(memory.device)
    # tables with rows; the same tensor if all have rows: a view would be another input of ops
    row_meta = meta[: len(config.tables)] if counted else meta
    return _Constants(meta, row_meta, init.tensor().to(memory.device), region_begin)


def _default_records(
    init: InitData, default: Default, dim: int, row: Tensor, whole: ColumnShard
) -> tuple[int | Tensor, int | Tensor]:
    if isinstance(default, Tensor):
        return init.add_vector(default)
    if isinstance(default, Initializer):
        first = whole.first_column
        return init.add(default, whole.embedding_dim, range(first, first + dim))
    if default == "zeros":
        return init.add_vector(torch.zeros(dim, device="cpu"))
    return row[Meta.INIT_BEGIN], row[Meta.INIT_COUNT]


def _index_tensors(
    config: GroupConfig, memory: TableMemory, rows: list[int], constants: _Constants
) -> IndexTensors:
    count, words = constants.meta.shape[0], len(config.layout.score_words)

    def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=memory.device)

    def reserve(*size: int) -> Tensor:
        return memory.reserve(size, torch.int64, huge_pages=False)

    buckets = constants.buckets
    index = IndexTensors(
        buckets=reserve(buckets, BUCKET_WORDS),
        scores=reserve(buckets if words > 0 else 0, BUCKET_WIDTH * max(words, 1)),
        tables=zeros(count, TABLE_COLUMNS),
        slabs=zeros(len(config.slabs), SLAB_COLUMNS),
        free_rows=reserve(len(config.slabs), max(rows)),
        sketch=zeros(config.layout.sketch_cells, dtype=torch.int32),
        evicted=zeros(1, EVICTED_COLUMNS),
        meta=constants.meta,
        policy=config.layout.policy_tensor().to(memory.device),
        clock=zeros(CLOCK_HEAD + count),
    )
    index.tables[:, Table.BUCKET_COUNT] = MIN_BUCKETS
    for s, slab in enumerate(config.slabs):
        index.slabs[s, Slab.ROW_BYTES] = config.memory_row_bytes(slab)
    return index


def _row_tensors(
    config: GroupConfig,
    memory: TableMemory,
    rows: list[int],
    slots: list[int],
    constants: _Constants,
) -> RowTensors:
    def reserve(slab: int, *columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        count = slots[slab]
        if count == 0 or not config.slabs[slab].tiered:
            count += rows[slab]
        return memory.reserve((count, *columns), dtype, huge_pages=True)

    optimizer = config.optimizer
    slabs = list(enumerate(config.slabs))
    state = []
    for tensor in () if optimizer is None else optimizer.state:
        for s, slab in slabs:
            columns = () if tensor.per_row else (tensor.columns(slab.dim),)
            state.append(reserve(s, *columns, dtype=tensor.dtype))
    count = len(config.tables)
    hyper = [0.0] * HYPER_COLUMNS if optimizer is None else optimizer.hyper_row()
    return RowTensors(
        weights=[reserve(s, slab.dim, dtype=slab.dtype) for s, slab in slabs],
        generations=[reserve(s, dtype=torch.int32) for s, _ in slabs],
        state=state,
        dirty_bits=[],
        copy_on_write=[],
        row_clock=torch.zeros(count + ROW_CLOCK_EXTRA, dtype=torch.int64, device=memory.device),
        hyper=torch.tensor([hyper] * count, dtype=torch.float64, device=memory.device),
        meta=constants.row_meta,
        init_data=constants.init_data,
        pending=_pending_gradients(config, memory, rows).flat() if config.split else [],
    )


def _tiers(
    config: GroupConfig,
    memory: TableMemory,
    rows: list[int],
    slots: list[int],
    index: IndexTensors,
    row_tensors: RowTensors,
) -> Tiers | None:
    if isinstance(config.storage, HostStore):
        return _host_tiers(config.storage, memory, rows, slots, index, row_tensors)
    if config.storage is None:
        return None
    if memory.has_cache:
        return _device_tiers(config, config.storage, memory, rows, slots, index, row_tensors)
    return _store_tiers(config, config.storage, memory, rows, index, row_tensors)


def _store_tiers(
    config: GroupConfig,
    storage: CachedStorage,
    memory: TableMemory,
    rows: list[int],
    index: IndexTensors,
    row_tensors: RowTensors,
) -> StoreTiers:
    """Make the cache of a group in host memory, and open its store."""
    slabs = list(enumerate(config.slabs))

    def reserve(slab: SlabConfig, *size: int, dtype: torch.dtype) -> Tensor:
        if not slab.tiered:
            return torch.zeros(0, *size[1:], dtype=dtype, device=memory.device)
        return memory.reserve(size, dtype, huge_pages=True)

    tensors = TierTensors(
        [reserve(slab, rows[s], dtype=torch.int32) for s, slab in slabs],
        [reserve(slab, rows[s], SLOT_COLUMNS, dtype=torch.int64) for s, slab in slabs],
        [reserve(slab, rows[s], dtype=torch.int32) for s, slab in slabs],
        torch.zeros(1 + len(slabs), TIER_COLUMNS, dtype=torch.int64, device=memory.device),
    )
    return open_tiers(
        storage,
        tensors,
        index,
        row_tensors,
        cached=[s for s, slab in slabs if slab.tiered],
        slot_bytes=[config.row_bytes(slab) + SLOT_BYTES for _, slab in slabs],
        slab_names=[slab.name for _, slab in slabs],
        table_names=config.names,
    )


def _device_tiers(
    config: GroupConfig,
    storage: CachedStorage,
    memory: TableMemory,
    rows: list[int],
    slots: list[int],
    index: IndexTensors,
    row_tensors: RowTensors,
) -> Tiers:
    """Make the caches of a group on a GPU and in host memory, and open its store."""
    size = storage.device_size
    if size is None:
        raise RuntimeError(
            f"TableGroup: storage is {storage}, but the device is {memory.device}: a GPU needs a "
            "cache of its own above a store: give device_cache="
        )
    slabs = list(enumerate(config.slabs))
    cached = [s for s, slab in slabs if slab.tiered]
    given = f"{type(storage).__name__} has device_cache={storage.device_cache!r}"
    limits = _shared_slots(config, rows, cached, size, given)
    limits = [min(limit, most) for limit, most in zip(limits, slots, strict=True)]
    tensors = _tier_tensors(memory, rows, slots)
    host_memory = HostMemory()

    def in_host_memory(tensor: Tensor, slab: int) -> Tensor:
        count = rows[slab] if slab in cached else 0
        if count == 0:
            return torch.zeros(0, *tensor.shape[1:], dtype=tensor.dtype, device=host_memory.device)
        return host_memory.reserve((count, *tensor.shape[1:]), tensor.dtype, huge_pages=True)

    host_rows = row_tensors._replace(
        weights=[in_host_memory(tensor, s) for s, tensor in enumerate(row_tensors.weights)],
        generations=[in_host_memory(tensor, s) for s, tensor in enumerate(row_tensors.generations)],
        state=[
            in_host_memory(tensor, k % len(slabs)) for k, tensor in enumerate(row_tensors.state)
        ],
        pending=[],
    )
    below = _store_tiers(config, storage, host_memory, rows, index, host_rows)
    return open_device_tiers(
        size, below, tensors, index, row_tensors, host_rows, cached=cached, limits=limits
    )


def _host_tiers(
    storage: HostStore,
    memory: TableMemory,
    rows: list[int],
    slots: list[int],
    index: IndexTensors,
    row_tensors: RowTensors,
) -> Tiers | None:
    cached = [slab for slab, count in enumerate(slots) if count > 0]
    if not cached:
        return None

    return HostTiers(storage, _tier_tensors(memory, rows, slots), index, row_tensors, cached)


def _tier_tensors(memory: TableMemory, rows: list[int], slots: list[int]) -> TierTensors:
    """Return the tensors of a cache in HBM, empty; ``slots``: by slab, 0 for none."""

    def reserve(count: int, *columns: int, dtype: torch.dtype) -> Tensor:
        if count == 0:
            return torch.zeros(0, *columns, dtype=dtype, device=memory.device)
        return memory.reserve((count, *columns), dtype, huge_pages=True)

    homes = [count if slots[slab] > 0 else 0 for slab, count in enumerate(rows)]
    return TierTensors(
        [reserve(count, dtype=torch.int32) for count in homes],
        [reserve(count, SLOT_COLUMNS, dtype=torch.int64) for count in slots],
        [reserve(count, dtype=torch.int32) for count in slots],
        torch.zeros(1 + len(rows), TIER_COLUMNS, dtype=torch.int64, device=memory.device),
    )


def _pending_gradients(
    config: GroupConfig, memory: TableMemory, rows: list[int]
) -> PendingGradients:
    # twice the rows: merged gradients, and one more lookup of all rows
    room = [(2 * n, slab.dim) for n, slab in zip(rows, config.slabs, strict=True)]
    handles, ids, tables = (
        [memory.reserve((n,), torch.int64, huge_pages=True) for n, _ in room] for _ in range(3)
    )
    gradients = [memory.reserve(size, torch.float32, huge_pages=True) for size in room]
    counts = torch.zeros(len(room), 2, dtype=torch.int64, device=memory.device)
    return PendingGradients(handles, ids, tables, gradients, counts)


def _table_seed(base: int, name: str) -> int:
    digest = hashlib.sha256(f"{base}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


__all__ = ["allocate"]
