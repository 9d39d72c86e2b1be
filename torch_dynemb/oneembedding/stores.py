"""Where the rows of an embedding lie: its tiers of storage, and the folder that is its own."""

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
from torch_dynemb.storage.tiers import SSDStore

Kind = Literal["device_mem", "cached_host_mem", "cached_ssd"]
PersistentPath = str | PathLike[str] | Sequence[str | PathLike[str]]
BLOCK_SIZES = (512, 4096)


@dataclass(frozen=True)
class StoreOptions:
    """Where rows lie; ``make_device_mem_store_options`` and kin make it.

    Attributes:
        kind: which memory has all rows.
        persistent_path: a folder for all ranks, or one for each.
        capacity: ids of a table over all ranks; None: as many as there is room for.
        size_factor: what a row takes with its optimizer state, in multiples of its columns.
        storage_dim: the same in elements; -1: ``size_factor`` says it.
        physical_block_size: bytes of a sector of the disk.
        cache_bytes: memory for rows that are in use, where all rows lie in a slower one.
        disk: bytes that the files of a rank may take; None: what is free.
        segment: bytes of one of these files.
    """

    kind: Kind
    persistent_path: str | tuple[str, ...]
    capacity: int | None
    size_factor: int
    storage_dim: int
    physical_block_size: int
    cache_bytes: int
    disk: int | str | None = None
    segment: int | str = 64 << 20

    def storage(self, rank: int, size: int) -> SSDStore | None:
        """Where the rows of a rank lie that are not in memory; None: all are.

        Args:
            rank: of ``size`` ranks.
            size: how many ranks there are.
        """
        if self.kind != "cached_ssd":
            return None
        paths = self.persistent_path
        folder = Path(paths, f"{rank}-{size}") if isinstance(paths, str) else Path(paths[rank])
        return SSDStore(folder, cache=self.cache_bytes, disk=self.disk, segment=self.segment)

    def root(self) -> Path:
        """The folder that has the snapshots of all ranks, of the path or the first of several."""
        paths = self.persistent_path
        return root_of(Path(paths if isinstance(paths, str) else paths[0]))

    def check_ranks(self, owner: str, size: int) -> None:
        """Refuses a list of paths that is not one for each rank.

        Args:
            owner: prefix of error messages.
            size: how many ranks there are.

        Raises:
            ValueError: there are more or fewer paths.
        """
        paths = self.persistent_path
        if not isinstance(paths, str) and len(paths) != size:
            raise ValueError(
                f"{owner}: persistent_path has {len(paths)} paths, but there are {size} ranks: "
                "give one path for each, or one for all"
            )

    def check_device(self, owner: str, device: torch.device) -> None:
        """Refuses a device on which rows cannot lie so.

        Args:
            owner: prefix of error messages.
            device: of the embedding.

        Raises:
            RuntimeError: it is such a device.
        """
        if self.kind != "device_mem" and device.type != "cpu":
            place = "in host memory" if self.kind == "cached_host_mem" else "on SSD"
            raise RuntimeError(
                f"{owner}: rows {place} with a cache on {device} are not built yet: give "
                "make_device_mem_store_options, or leave the embedding on the CPU"
            )

    def stored_dim(self, dim: int) -> int:
        """Elements of a row with its optimizer state.

        Args:
            dim: columns of the row.
        """
        return self.size_factor * dim if self.storage_dim == -1 else self.storage_dim

    def check_state(self, owner: str, dim: int, optimizer: str, needed: int) -> None:
        """Refuses an optimizer with which a row is wider than what was asked for.

        Args:
            owner: prefix of error messages.
            dim: columns of a row.
            optimizer: its name.
            needed: elements of a row with its state.

        Raises:
            ValueError: there is too little room.
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
    """``value``, which must be one of ``BLOCK_SIZES``.

    Raises:
        TypeError, ValueError: it is not an int, or another.
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
        disk=disk,
        segment=segment,
    )
    options.storage(0, 1)  # raises if the sizes are none
    return options


def make_device_mem_store_options(
    persistent_path: PersistentPath,
    capacity: int,
    size_factor: int = 1,
    storage_dim: int = -1,
    physical_block_size: int = 4096,
) -> StoreOptions:
    """Rows in the memory of the embedding's device; the path is for snapshots only.

    Args:
        persistent_path: a folder that all ranks see; or a list with one for each rank, the first of
            which has the snapshots.
        capacity: ids that a table may have over all ranks, at least 1; a full table evicts the id
            that was not seen for the longest time. :func:`make_table_options` says it by table.
        size_factor: what a row takes with its optimizer state, in multiples of its columns: SGD 1,
            with momentum 2, Adagrad 2, Adam 3, Ftrl 3. An optimizer with more state is refused.
        storage_dim: the same in elements, in place of ``size_factor``; -1: it is not given. Such as
            3 * dim + 1 for SmartDecayAdam.
        physical_block_size: 512 or 4096: bytes of a sector of the disk. The files of this package
            do not depend on it; :func:`import_snapshot` needs it.

    Returns:
        What an embedding takes as ``store_options``.

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
    """Rows in host memory. On the CPU that is one tier; with a GPU it is refused as not built yet.

    Args:
        cache_budget_mb: MiB of a GPU's memory for rows that are in use, at least 1; a CPU needs no
            such cache.
        persistent_path, capacity, size_factor, storage_dim, physical_block_size: as in
            :func:`make_device_mem_store_options`.

    Returns:
        What an embedding takes as ``store_options``.

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
    """Rows on SSD, of which a cache in memory has those in use; see :class:`torch_dynemb.SSDStore`.

    A rank's files are in ``<path>/<rank>-<ranks>``, or in its own path of a list. What they hold is
    of the running program: snapshots are beside them. Give the embedding its optimizer before its
    first lookup, because rows lie on the disk with the state.

    Args:
        cache_budget_mb: MiB of a GPU's memory for rows that are in use. There is no such cache yet:
            on the CPU it adds to that of the host.
        persistent_path: a folder on a fast SSD, or a list with one for each rank.
        capacity: ids that a table may have over all ranks; None: as many as there is room for.
        size_factor, storage_dim, physical_block_size: as in
            :func:`make_device_mem_store_options`.
        host_cache_budget_mb: MiB of host memory for rows that are in use, of each rank. This and
            ``cache_budget_mb`` must not both be 0.
        disk: bytes that the files of a rank may take, a number or a text such as ``"200GB"``;
            default: what the file system has free.
        segment: bytes of one of these files, a multiple of 4096.

    Returns:
        What an embedding takes as ``store_options``.

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
        cache_mb=device_mb + host_mb,
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
