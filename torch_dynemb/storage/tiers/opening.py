"""Construction of the cache of a group with tiered tables, over its open store."""

from __future__ import annotations

from collections.abc import Sequence

from torch_dynemb.ops.tensors import IndexTensors, RowTensors, TierTensors
from torch_dynemb.storage.tiers.configs import CachedStorage, ExternalStore
from torch_dynemb.storage.tiers.external import ExternalTiers
from torch_dynemb.storage.tiers.ssd import SSDTiers
from torch_dynemb.storage.tiers.tiers import Tiers


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
) -> Tiers:
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


__all__ = ["open_tiers"]
