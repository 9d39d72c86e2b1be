"""Tables larger than memory: a cache of rows above host memory or a store of rows."""

from torch_dynemb.storage.tiers.configs import (
    ExternalStore,
    SSDStore,
    Storage,
    check_storage,
    needs_device_cache,
)
from torch_dynemb.storage.tiers.host_store import HostStore
from torch_dynemb.storage.tiers.protocol import RecordStore
from torch_dynemb.storage.tiers.stats import StorageStats

__all__ = [
    "ExternalStore",
    "HostStore",
    "RecordStore",
    "SSDStore",
    "Storage",
    "StorageStats",
    "check_storage",
    "needs_device_cache",
]
