"""Configs of stores: where rows are that are not in memory."""

from __future__ import annotations

import dataclasses
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch_dynemb.argument_checks import described
from torch_dynemb.policy.admission import parse_bytes
from torch_dynemb.storage.tiers.cache_size import CacheSize, parse_cache
from torch_dynemb.storage.tiers.host_store import HostStore
from torch_dynemb.storage.tiers.protocol import RecordStore

PAGE_BYTES = 4096
IO_PATHS = ("auto", "io_uring", "threads")


@dataclass(frozen=True)
class SSDStore:
    """Rows on a disk, with a cache in memory for rows in use.

    Ids, handles and scores stay in memory: about 35 bytes an id. Rows and optimizer state go to
    files in ``path``, a log of segments. Segments with overwritten rows are garbage-collected. Rows
    written after the last snapshot are lost when the process ends.

    A training lookup raises "disk full" before it inserts or counts an id. So the step can be
    repeated after ids were erased, an asynchronous save has ended, or the file system has room
    again. If a step has several lookups, those before the failed one have been counted.

    The stores of a process open at most a quarter of its open files (``ulimit -n``). The least
    recently used files are closed, and reopened on demand. Other files in ``path`` stay untouched.

    Args:
        path: a directory for this table group alone; created if missing.
        cache: rows in host memory: bytes (an int, or a text such as ``"4GB"``), ``"100000 rows"``,
            or a fraction of the tables' rows (0.25, or ``"25%"``). A step that needs more rows at
            once gets them, with a warning. The warning is left out if the cache is a fraction and
            the step needs half of a table's rows.
        disk: bytes that the files may take, a number or a text such as ``"200GB"``; default: the
            free space of the file system. Rows need a third more for garbage collection, and a
            snapshot needs as much again. At least 4 segments for each dim and dtype of rows.
        segment: bytes of a file, a multiple of 4096; at least two segments stay free.
        io: how rows are read: ``"io_uring"``; ``"threads"``, with pread; or ``"auto"``: io_uring if
            this build and the kernel have it.
        device_cache: rows in the memory of a GPU (HBM), above ``cache``, in the same units. Tables
            on a GPU need it. A step that needs more rows at once gets them, with a warning. On the
            CPU all cached rows are in host memory, and ``device_cache`` has no effect.

    Raises:
        TypeError, ValueError: a wrong value.

    Example:
        >>> import torch_dynemb as td
        >>> storage = td.SSDStore("/fast/rows", cache="25%", disk="200GB")
        >>> table = td.TableConfig("user", 64, storage=storage)
    """

    path: str | os.PathLike[str]
    cache: int | float | str = 0.25
    disk: int | str | None = None
    segment: int | str = 64 << 20
    io: Literal["auto", "io_uring", "threads"] = "auto"
    device_cache: int | float | str | None = None
    cache_size: CacheSize = field(init=False, repr=False, compare=False)
    device_size: CacheSize | None = field(init=False, repr=False, compare=False)
    disk_bytes: int = field(init=False, repr=False, compare=False)
    segment_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise TypeError(
                f"SSDStore: path is {described(self.path)}, expected the name of a directory"
            )
        if "://" in str(self.path):
            raise ValueError(
                f"SSDStore: path is {self.path!r}, a URL, but stores lie on local disks: give a "
                "directory there. Checkpoints and delta logs of its tables may lie at URLs"
            )
        object.__setattr__(self, "path", str(Path(self.path)))
        set_caches(self)
        disk = 0 if self.disk is None else parse_bytes("SSDStore: disk", self.disk)
        segment = parse_bytes("SSDStore: segment", self.segment)
        if segment % PAGE_BYTES != 0 or not 4 * PAGE_BYTES <= segment <= 1 << 32:
            raise ValueError(
                f"SSDStore: segment is {self.segment!r}, expected a multiple of {PAGE_BYTES} bytes "
                f"from {4 * PAGE_BYTES} to {1 << 32}"
            )
        if 0 < disk < 4 * segment:
            fits = disk // 4 // PAGE_BYTES * PAGE_BYTES
            smaller = f", or segment={fits} or less" if fits >= 4 * PAGE_BYTES else ""
            raise ValueError(
                f"SSDStore: disk is {self.disk!r}, expected at least 4 segments of "
                f"segment={self.segment!r}, of which two are kept free for garbage collection: "
                f"give disk={4 * segment} or more{smaller}"
            )
        object.__setattr__(self, "disk_bytes", disk)
        object.__setattr__(self, "segment_bytes", segment)
        if self.io not in IO_PATHS:
            raise ValueError(f"SSDStore: io is {self.io!r}, expected one of {list(IO_PATHS)}")

    def total_bytes(self) -> int:
        """Return the bytes that the files may take: ``disk``, or the space of the file system."""
        if self.disk_bytes > 0:
            return self.disk_bytes
        there = Path(self.path)
        own = sum(file.stat().st_size for file in there.glob("rows/*/*"))
        while not there.is_dir():
            there = there.parent
        return own + shutil.disk_usage(there).free

    def within(self, name: str) -> SSDStore:
        """Return the same store in a subdirectory, for one of several groups or ranks.

        Args:
            name: of the subdirectory.
        """
        return dataclasses.replace(self, path=str(Path(self.path) / name))


@dataclass(frozen=True)
class ExternalStore:
    """Rows in a user's store, with a cache in memory for rows in use.

    Args:
        store: reads and writes records; see :class:`torch_dynemb.storage.tiers.RecordStore`.
            Several modules may share one if their tables have different names.
        cache: rows in host memory, as of :class:`SSDStore`.
        device_cache: rows in the memory of a GPU, as of :class:`SSDStore`.

    Raises:
        TypeError, ValueError: a wrong value, or ``store`` lacks a method.
    """

    store: RecordStore
    cache: int | float | str = 0.25
    device_cache: int | float | str | None = None
    cache_size: CacheSize = field(init=False, repr=False, compare=False)
    device_size: CacheSize | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for method in ("read", "write", "erase"):
            if not callable(getattr(self.store, method, None)):
                raise TypeError(
                    f"ExternalStore: store is {described(self.store)}, which has no {method}(): "
                    "see torch_dynemb.storage.tiers.RecordStore"
                )
        set_caches(self)


# Rows beneath memory, with a cache of them in memory.
CachedStorage = SSDStore | ExternalStore
Storage = HostStore | CachedStorage


def set_caches(storage: CachedStorage) -> None:
    """Set the sizes of the caches of a new storage config.

    Raises:
        TypeError, ValueError: ``cache`` or ``device_cache`` is not a size.
    """
    name, device = type(storage).__name__, storage.device_cache
    object.__setattr__(storage, "cache_size", parse_cache(f"{name}: cache", storage.cache))
    size = None if device is None else parse_cache(f"{name}: device_cache", device)
    object.__setattr__(storage, "device_size", size)


def needs_device_cache(storage: Storage | None) -> bool:
    """Return whether tables with this storage cannot be on a GPU for want of a cache there.

    Args:
        storage: of the tables; None: rows are in the memory of the device.
    """
    return isinstance(storage, SSDStore | ExternalStore) and storage.device_size is None


def check_storage(owner: str, storage: object, *, argument: str = "storage") -> None:
    """Check the ``storage`` of a table.

    Args:
        owner: beginning of an error's message.
        storage: config of the store; None: rows stay in memory.
        argument: its name in the caller.

    Raises:
        TypeError: it is something else.
    """
    if storage is not None and not isinstance(storage, HostStore | SSDStore | ExternalStore):
        raise TypeError(
            f"{owner}: {argument} is {described(storage)}, expected HostStore, SSDStore, "
            "ExternalStore, or None: rows are in the memory of the device"
        )


__all__ = [
    "IO_PATHS",
    "PAGE_BYTES",
    "CachedStorage",
    "ExternalStore",
    "SSDStore",
    "Storage",
    "check_storage",
    "needs_device_cache",
]
