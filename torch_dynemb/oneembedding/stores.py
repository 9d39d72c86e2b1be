"""Storage options of an embedding: its tiers, and its own folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

import torch

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.oneembedding.snapshots import root_of
from torch_dynemb.storage.tiers import HostStore, SSDStore

Kind = Literal["device_mem", "cached_host_mem", "cached_ssd"]
PersistentPath = str | PathLike[str] | Sequence[str | PathLike[str]]
BLOCK_SIZES = (512, 4096)
# of a GPU or its host, where a budget is 0
_LEAST_CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class StoreOptions:
    """Storage options, as returned by ``make_device_mem_store_options`` and the like.

    Attributes:
        kind: memory that holds all rows.
        persistent_path: a folder for all ranks, or one for each.
        capacity: ids of a table over all ranks; None: bounded by the storage only.
        size_factor: size of a row with its optimizer state, in multiples of its columns.
        storage_dim: the same in elements; -1: use ``size_factor``.
        physical_block_size: bytes of a sector of the disk.
        cache_bytes: memory of a GPU for rows in use, if all rows lie in a slower tier.
        host_cache_bytes: memory of the host for rows in use, if all rows are on SSD.
        disk: bytes that the files of a rank may take; None: the free space.
        segment: bytes of one of these files.
    """

    kind: Kind
    persistent_path: str | tuple[str, ...]
    capacity: int | None
    size_factor: int
    storage_dim: int
    physical_block_size: int
    cache_bytes: int
    host_cache_bytes: int = 0
    disk: int | str | None = None
    segment: int | str = 64 << 20

    def storage(
        self, rank: int, size: int, device: torch.device | None = None
    ) -> SSDStore | HostStore | None:
        """Return the store of a rank's rows outside the memory of its device; None: there is none.

        On the CPU the budgets of both caches add up.

        Args:
            rank: of ``size`` ranks.
            size: number of ranks.
            device: of the rows; None: the CPU.
        """
        on_gpu = device is not None and device.type != "cpu"
        if self.kind == "device_mem":
            return None
        if self.kind == "cached_host_mem":
            return HostStore(cache=self.cache_bytes) if on_gpu else None
        paths = self.persistent_path
        folder = Path(paths, f"{rank}-{size}") if isinstance(paths, str) else Path(paths[rank])
        total = self.cache_bytes + self.host_cache_bytes
        return SSDStore(
            folder,
            cache=max(self.host_cache_bytes, _LEAST_CACHE_BYTES) if on_gpu else total,
            disk=self.disk,
            segment=self.segment,
            device_cache=(self.cache_bytes or _LEAST_CACHE_BYTES) if on_gpu else None,
        )

    def root(self) -> Path:
        """Return the folder with the snapshots of all ranks: of the path, or of the first of
        several."""
        paths = self.persistent_path
        return root_of(Path(paths if isinstance(paths, str) else paths[0]))

    def check_ranks(self, owner: str, size: int) -> None:
        """Check that a list of paths has one path for each rank.

        Args:
            owner: prefix of error messages.
            size: number of ranks.

        Raises:
            ValueError: the number of paths differs.
        """
        paths = self.persistent_path
        if not isinstance(paths, str) and len(paths) != size:
            raise ValueError(
                f"{owner}: persistent_path has {len(paths)} paths, but there are {size} ranks: "
                "give one path for each, or one for all"
            )

    def check_move(self, owner: str, before: torch.device, after: torch.device) -> None:
        """Check that an embedding with this storage can move to another device.

        Args:
            owner: prefix of error messages.
            before, after: devices of the embedding.

        Raises:
            RuntimeError: it has caches, which depend on the device.
        """
        if self.kind != "device_mem" and before != after:
            raise RuntimeError(
                f"{owner}: the caches of {self.kind} were made for {before}: "
                f"construct the embedding with device={str(after)!r}, and load a snapshot"
            )

    def stored_dim(self, dim: int) -> int:
        """Return the elements of a row with its optimizer state.

        Args:
            dim: columns of the row.
        """
        return self.size_factor * dim if self.storage_dim == -1 else self.storage_dim

    def check_state(self, owner: str, dim: int, optimizer: str, needed: int) -> None:
        """Check that rows with their optimizer state fit the declared width.

        Args:
            owner: prefix of error messages.
            dim: columns of a row.
            optimizer: its name.
            needed: elements of a row with its state.

        Raises:
            ValueError: the declared width is too small.
        """
        if needed > self.stored_dim(dim):
            asked = (
                f"size_factor is {self.size_factor}"
                if self.storage_dim == -1
                else f"storage_dim is {self.storage_dim}"
            )
            factor = f"size_factor={needed // dim} or " if needed % dim == 0 else ""
            raise ValueError(
                f"{owner}: {asked}, which is {self.stored_dim(dim)} elements for a row of {dim} "
                f"columns, but with {optimizer} it takes {needed}: give the store options "
                f"{factor}storage_dim={needed}"
            )


def _checked_path(owner: str, path: object) -> str | tuple[str, ...]:
    if isinstance(path, str | PathLike):
        return os.fspath(path)
    if not isinstance(path, list | tuple) or not all(isinstance(p, str | PathLike) for p in path):
        raise TypeError(
            f"{owner}: persistent_path is {described(path)}, expected a path, or a list of paths, "
            "one for each rank"
        )
    if not path:
        raise ValueError(f"{owner}: persistent_path is empty, expected one path for each rank")
    return tuple(os.fspath(p) for p in path)


def block_size(owner: str, value: object) -> int:
    """Check that ``value`` is one of ``BLOCK_SIZES`` and return it.

    Raises:
        TypeError, ValueError: it is not an int, or not one of them.
    """
    size = integer(f"{owner}: physical_block_size", value)
    if size not in BLOCK_SIZES:
        raise ValueError(f"{owner}: physical_block_size is {size}, expected one of {BLOCK_SIZES}")
    return size


def _options(
    owner: str,
    kind: Kind,
    persistent_path: PersistentPath,
    capacity: int | None,
    size_factor: int,
    storage_dim: int,
    physical_block_size: int,
    cache_mb: int = 0,
    host_cache_mb: int = 0,
    disk: int | str | None = None,
    segment: int | str = 64 << 20,
) -> StoreOptions:
    path = _checked_path(owner, persistent_path)
    if capacity is not None:
        capacity = integer(f"{owner}: capacity", capacity, least=1)
    size_factor = integer(f"{owner}: size_factor", size_factor, least=1)
    storage_dim = integer(f"{owner}: storage_dim", storage_dim)
    if storage_dim != -1 and storage_dim < 1:
        raise ValueError(
            f"{owner}: storage_dim is {storage_dim}, expected at least 1, or -1 for size_factor"
        )
    physical_block_size = block_size(owner, physical_block_size)
    options = StoreOptions(
        *(kind, path, capacity, size_factor, storage_dim, physical_block_size, cache_mb << 20),
        host_cache_bytes=host_cache_mb << 20,
        disk=disk,
        segment=segment,
    )
    options.storage(0, 1)  # raises if the sizes are invalid
    return options


def make_device_mem_store_options(
    persistent_path: PersistentPath,
    capacity: int,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
) -> StoreOptions:
    """Store rows in the memory of the embedding's device; the path is for snapshots only.

    Args:
        persistent_path: a folder that all ranks can access, or a list with one for each rank. The
            first of a list has the snapshots.
        capacity: maximum number of ids of a table over all ranks, at least 1. A full table evicts
            the least recently used id. :func:`make_table_options` sets it for one table.
        size_factor: size of a row with its optimizer state, in multiples of its columns: SGD 1,
            with momentum 2, Adagrad 2, Adam 3, Ftrl 3. An optimizer with more state is rejected.
        storage_dim: the same in elements, in place of ``size_factor``, such as 3 * dim + 1 for
            SmartDecayAdam. -1: use ``size_factor``.
        physical_block_size: 512 or 4096: bytes of a sector of the disk. The files of this package
            do not depend on it; :func:`import_snapshot` needs it.

    Returns:
        ``store_options`` of an embedding.

    Raises:
        TypeError, ValueError: a wrong value.
    """
    owner = "make_device_mem_store_options"
    capacity = integer(f"{owner}: capacity", capacity, least=1)
    return _options(
        *(owner, "device_mem", persistent_path, capacity),
        *(size_factor, storage_dim, physical_block_size),
    )


def make_cached_host_mem_store_options(
    cache_budget_mb: int,
    persistent_path: PersistentPath,
    capacity: int,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
) -> StoreOptions:
    """Store rows in host memory, with a cache on a GPU; see :class:`torch_dynemb.HostStore`.

    Args:
        cache_budget_mb: MiB of a GPU's memory for rows in use, at least 1. Unused on the CPU.
        persistent_path, capacity, size_factor, storage_dim, physical_block_size: as in
            :func:`make_device_mem_store_options`.

    Returns:
        ``store_options`` of an embedding.

    Raises:
        TypeError, ValueError: a wrong value.
    """
    owner = "make_cached_host_mem_store_options"
    cache_mb = integer(f"{owner}: cache_budget_mb", cache_budget_mb, least=1)
    capacity = integer(f"{owner}: capacity", capacity, least=1)
    return _options(
        *(owner, "cached_host_mem", persistent_path, capacity),
        *(size_factor, storage_dim, physical_block_size),
        cache_mb=cache_mb,
    )


def make_cached_ssd_store_options(
    cache_budget_mb: int,
    persistent_path: PersistentPath,
    capacity: int | None = None,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
    host_cache_budget_mb: int = 0,
    *,
    disk: int | str | None = None,
    segment: int | str = 64 << 20,
) -> StoreOptions:
    """Store rows on SSD with a memory cache of the rows in use; see :class:`torch_dynemb.SSDStore`.

    The files of a rank are in ``<path>/<rank>-<ranks>``, or in its own path of a list. They belong
    to the running program; snapshots are stored beside them. Set the optimizer of the embedding
    before its first lookup, because rows on disk include the optimizer state.

    Args:
        cache_budget_mb: MiB of a GPU's memory for rows in use; 0 means 64 there. On the CPU it adds
            to the host cache.
        persistent_path: a folder on a fast SSD, or a list with one for each rank.
        capacity: maximum number of ids of a table over all ranks; None: bounded by the disk only.
        size_factor, storage_dim, physical_block_size: as in
            :func:`make_device_mem_store_options`.
        host_cache_budget_mb: MiB of host memory of each rank for rows in use; with a GPU at least
            64, because rows pass through it. This and ``cache_budget_mb`` must not both be 0.
        disk: bytes that the files of a rank may take, a number or a text such as ``"200GB"``.
            Default: the free space of the file system.
        segment: bytes of one of these files, a multiple of 4096.

    Returns:
        ``store_options`` of an embedding.

    Raises:
        TypeError, ValueError: a wrong value, or no cache.
    """
    owner = "make_cached_ssd_store_options"
    device_mb = integer(f"{owner}: cache_budget_mb", cache_budget_mb, least=0)
    host_mb = integer(f"{owner}: host_cache_budget_mb", host_cache_budget_mb, least=0)
    if device_mb + host_mb == 0:
        raise ValueError(
            f"{owner}: cache_budget_mb and host_cache_budget_mb are 0, expected at least one cache"
        )
    return _options(
        *(owner, "cached_ssd", persistent_path, capacity),
        *(size_factor, storage_dim, physical_block_size),
        cache_mb=device_mb,
        host_cache_mb=host_mb,
        disk=disk,
        segment=segment,
    )


__all__ = [
    "BLOCK_SIZES",
    "PersistentPath",
    "StoreOptions",
    "block_size",
    "make_cached_host_mem_store_options",
    "make_cached_ssd_store_options",
    "make_device_mem_store_options",
]
