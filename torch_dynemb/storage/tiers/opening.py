"""Construction of the cache of a group with tiered tables, over its open store."""

from __future__ import annotations

from collections.abc import Sequence

from torch_dynemb.ops.tensors import IndexTensors, RowTensors, TierTensors
from torch_dynemb.storage.tiers.cache_size import CacheSize
from torch_dynemb.storage.tiers.configs import CachedStorage, ExternalStore
from torch_dynemb.storage.tiers.device_files import DeviceFileTiers
from torch_dynemb.storage.tiers.device_tiers import DeviceTiers
from torch_dynemb.storage.tiers.external import ExternalTiers
from torch_dynemb.storage.tiers.host_cache import HostCache
from torch_dynemb.storage.tiers.ssd import SSDTiers
from torch_dynemb.storage.tiers.store_tiers import StoreTiers


def open_tiers(
    storage: CachedStorage,
    tensors: TierTensors,
    index: IndexTensors,
    rows: RowTensors,
    *,
    cached: Sequence[int],
    slot_bytes: Sequence[int],
    slab_names: Sequence[str],
    table_names: Sequence[str],
) -> StoreTiers:
    """Make the cache of a group and open its store.

    Args:
        storage: config of the store.
        index: of the group.
        tensors, rows, cached, slot_bytes: see :class:`Tiers`.
        slab_names, table_names: of the group.

    Raises:
        RuntimeError: the store is in use, or has rows of other tables.
    """
    if isinstance(storage, ExternalStore):
        cache = storage.cache_size
        return ExternalTiers(
            storage.store, table_names, index, cache, tensors, rows, cached, slot_bytes
        )
    return SSDTiers(storage, slab_names, tensors, rows, cached, slot_bytes)


def open_device_tiers(
    size: CacheSize,
    below: StoreTiers,
    tensors: TierTensors,
    index: IndexTensors,
    rows: RowTensors,
    host_rows: RowTensors,
    *,
    cached: Sequence[int],
    limits: Sequence[int],
) -> DeviceTiers:
    """Make the cache of a group on a GPU, above one in host memory.

    Args:
        size: of the cache.
        below: the cache in host memory.
        tensors: of the cache, empty.
        index, rows: of the group.
        host_rows: those of ``below``.
        cached, limits: see :class:`DeviceTiers`.

    Raises:
        RuntimeError: GPU memory is short.
    """
    host = HostCache(below, host_rows, rows.meta.cpu(), pinned=rows.meta.is_cuda)
    if isinstance(below, SSDTiers):
        return DeviceFileTiers(below, size, host, tensors, index, rows, cached, limits)
    # a store that is written in Python is called by the looking-up thread alone
    return DeviceTiers(size, host, tensors, index, rows, cached, limits, background=False)


__all__ = ["open_device_tiers", "open_tiers"]
