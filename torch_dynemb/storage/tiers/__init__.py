"""Tables larger than memory: a cache of rows above host memory or a store of rows."""

from torch_dynemb.storage.tiers.cache_size import CacheSize
from torch_dynemb.storage.tiers.configs import (
    CachedStorage,
    ExternalStore,
    SSDStore,
    Storage,
    check_storage,
    needs_device_cache,
)
from torch_dynemb.storage.tiers.host_store import LEAST_SPLIT_BYTES, HostStore
from torch_dynemb.storage.tiers.host_tiers import HostTiers
from torch_dynemb.storage.tiers.opening import open_device_tiers, open_tiers
from torch_dynemb.storage.tiers.protocol import RecordStore
from torch_dynemb.storage.tiers.stats import StorageStats
from torch_dynemb.storage.tiers.store_tiers import StoreTiers
from torch_dynemb.storage.tiers.tiers import PinnedRecords, Records, Tiers

__all__ = [
    "LEAST_SPLIT_BYTES",
    "CacheSize",
    "CachedStorage",
    "ExternalStore",
    "HostStore",
    "HostTiers",
    "PinnedRecords",
    "RecordStore",
    "Records",
    "SSDStore",
    "Storage",
    "StorageStats",
    "StoreTiers",
    "Tiers",
    "check_storage",
    "needs_device_cache",
    "open_device_tiers",
    "open_tiers",
]
