"""Tiers of a GPU above files."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.tensors import IndexTensors, RowTensors, TierTensors
from torch_dynemb.storage.tiers.cache_size import CacheSize
from torch_dynemb.storage.tiers.device_tiers import DeviceTiers
from torch_dynemb.storage.tiers.host_cache import HostCache
from torch_dynemb.storage.tiers.pinned_rows import PinnedRows
from torch_dynemb.storage.tiers.ssd import SSDTiers
from torch_dynemb.storage.tiers.store_files import StoreFiles


class DeviceFileTiers(DeviceTiers, StoreFiles):
    """Caches in HBM and in host memory, above files.

    Args:
        below: the cache in host memory, and the files.
        size, host, tensors, index, rows, cached, limits: as for :class:`DeviceTiers`.
    """

    pins = True

    def __init__(
        self,
        below: SSDTiers,
        size: CacheSize,
        host: HostCache,
        tensors: TierTensors,
        index: IndexTensors,
        rows: RowTensors,
        cached: Sequence[int],
        limits: Sequence[int],
    ) -> None:
        super().__init__(size, host, tensors, index, rows, cached, limits, background=True)
        self._below = below
        self.storage = below.storage

    def sync(self) -> ops.StoreSnapshot:
        self.flush()
        return self.host.run(self._below.sync)

    def pin(self) -> PinnedRows:
        self.flush()
        return self.host.run(self._below.pin)

    def keep(self, files: Sequence[Tensor]) -> None:
        self.host.run(self._below.keep, files)

    def restore(self, snapshot: ops.StoreSnapshot) -> None:
        self.host.run(self._below.restore, snapshot)
        self.empty()


__all__ = ["DeviceFileTiers"]
