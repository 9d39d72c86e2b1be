"""Tables larger than memory: a cache of rows above host memory or a store of rows."""

from torch_dynemb.storage.tiers.configs import (
    CachedStorage,
    ExternalStore,
    SSDStore,
    Storage,
    check_storage,
)
from torch_dynemb.storage.tiers.host_store import LEAST_SPLIT_BYTES, HostStore
from torch_dynemb.storage.tiers.host_tiers import HostTiers
from torch_dynemb.storage.tiers.opening import open_tiers
from torch_dynemb.storage.tiers.protocol import RecordStore
from torch_dynemb.storage.tiers.stats import StorageStats
from torch_dynemb.storage.tiers.tiers import PinnedRecords, Records, Tiers

__all__ = [
    "LEAST_SPLIT_BYTES",
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
    "Tiers",
    "check_storage",
    "open_tiers",
]
