"""Snapshots that stay, and the files that a store keeps for them.

A snapshot exists while its file in ``snapshots/`` exists. Deleting that file deletes the snapshot,
and the next save frees its space.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from torch_dynemb.checkpoint.snapshots.places import (
    MANIFEST,
    StoredGroup,
    index_folder,
    index_folders,
    snapshot_files,
    snapshot_folder,
)
from torch_dynemb.checkpoint.snapshots.records import (
    Snapshot,
    read_snapshot,
    read_store,
)
from torch_dynemb.files.disk import Disk
from torch_dynemb.storage.tiers.store_files import StoreFiles

# by first store: uuids of the snapshots that the tables were loaded from or saved as
_histories: weakref.WeakKeyDictionary[StoreFiles, set[str]] = weakref.WeakKeyDictionary()


def snapshots_of(store: Path) -> list[Snapshot]:
    """List the snapshots of models that have this store first, in the order of their numbers.

    Raises:
        DamagedStoreError: a file is damaged.
    """
    found = [read_snapshot(path) for path in snapshot_files(store)]
    return sorted(found, key=lambda snapshot: snapshot.number)


def check_records(store: Path) -> None:
    """Raise DamagedStoreError if a record that a store keeps is damaged."""
    for folder in index_folders(store):
        if (folder / MANIFEST).exists():
            read_store(folder / MANIFEST)


def history(first: StoreFiles) -> set[str]:
    """Return the uuids of the snapshots that the tables continue.

    Args:
        first: first store of the model.
    """
    return _histories.get(first, set())


def goes_on_from(first: StoreFiles, snapshot: Snapshot) -> None:
    """Note that the tables were saved as this snapshot, or loaded from it.

    Args:
        first: first store of the model.
        snapshot: the snapshot.
    """
    _histories[first] = {*snapshot.history, snapshot.uuid}


def outdated(there: Sequence[Snapshot], new: Snapshot, keep: int) -> list[Snapshot]:
    """Return the snapshots that a new one replaces.

    Args:
        there: snapshots of the first store, ascending.
        new: the new one.
        keep: number of snapshots of its history that stay, itself included.
    """
    own = [of for of in there if of.uuid in new.history and of.name != new.name]
    return own[: max(0, len(own) - (keep - 1))]


def forget(disk: Disk, store: Path, snapshots: Sequence[Snapshot]) -> None:
    """Delete the names of snapshots, so that they no longer exist.

    Raises:
        OSError: the disk fails.
    """
    for snapshot in snapshots:
        (snapshot_folder(store) / snapshot.name).unlink(missing_ok=True)
    if snapshots:
        disk.sync_folder(snapshot_folder(store))


def clean(disk: Disk, stored: StoredGroup, first: Path, there: Collection[str]) -> None:
    """Delete what a store keeps for deleted snapshots, and the rows that only they need.

    Files of models with another first store stay.

    Args:
        disk: the file system.
        stored: the store.
        first: directory of the model's first store.
        there: uuids of the snapshots that exist in it.

    Raises:
        DamagedStoreError: a file of an existing snapshot is damaged.
        RuntimeError, OSError: the disk fails.
    """
    needed: list[list[int]] = [[] for _ in stored.group.config.slabs]
    names = {
        slab.name: files for slab, files in zip(stored.group.config.slabs, needed, strict=True)
    }
    for folder in index_folders(stored.path):
        if folder.name not in there and not (folder / MANIFEST).exists():  # of a dead save
            disk.remove(folder)
            continue
        record = read_store(folder / MANIFEST)
        named = Path(os.path.normpath(stored.path / record.first))
        if named == first and folder.name not in there:
            disk.remove(folder)
            continue
        for of in record.segments:
            names.setdefault(of.slab, []).extend(of.files)
    if index_folder(stored.path).is_dir():
        disk.sync_folder(index_folder(stored.path))
    stored.tiers.keep([torch.tensor(files, dtype=torch.int64, device="cpu") for files in needed])


__all__ = [
    "check_records",
    "clean",
    "forget",
    "goes_on_from",
    "history",
    "outdated",
    "snapshots_of",
]
