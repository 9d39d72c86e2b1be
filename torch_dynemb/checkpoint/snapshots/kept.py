"""Which snapshots stay, and what a store keeps for them.

A snapshot is there while its file in ``snapshots/`` is: whoever deletes that has deleted it, and
the next save gives the space back.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from torch_dynemb.checkpoint.files.disk import Disk
from torch_dynemb.checkpoint.snapshots.places import (
    MANIFEST,
    StoredGroup,
    index_folder,
    index_folders,
    snapshot_files,
    snapshot_folder,
    unfinished_folders,
)
from torch_dynemb.checkpoint.snapshots.records import (
    SavedStore,
    Snapshot,
    read_snapshot,
    read_store,
)
from torch_dynemb.storage.tiers.ssd import SSDTiers

# uuids of the snapshots that the tables have come from or made, by their first store
_histories: weakref.WeakKeyDictionary[SSDTiers, set[str]] = weakref.WeakKeyDictionary()


def snapshots_of(store: Path) -> list[Snapshot]:
    """The snapshots of models that have this store first; those of later ones come later.

    Raises:
        DamagedStoreError: a file is damaged.
    """
    found = [read_snapshot(path) for path in snapshot_files(store)]
    return sorted(found, key=lambda snapshot: snapshot.number)


def histories_of(store: Path) -> dict[Path, SavedStore]:
    """What a store keeps, by its folder.

    Raises:
        DamagedStoreError: a file is damaged.
    """
    return {folder: read_store(folder / MANIFEST) for folder in index_folders(store)}


def history(first: SSDTiers) -> set[str]:
    """uuids of the snapshots that the tables go on from.

    Args:
        first: the first store of the model.
    """
    return _histories.get(first, set())


def goes_on_from(first: SSDTiers, snapshot: Snapshot) -> None:
    """Takes note that the tables have been saved as this snapshot, or loaded from it.

    Args:
        first: the first store of the model.
        snapshot: that it is.
    """
    _histories[first] = {*snapshot.history, snapshot.uuid}


def outdated(there: Sequence[Snapshot], new: Snapshot, keep: int) -> list[Snapshot]:
    """Which snapshots go when another one is there.

    Args:
        there: those of the first store, ascending.
        new: the other one.
        keep: how many of its history stay, itself included.
    """
    own = [of for of in there if of.uuid in new.history and of.name != new.name]
    return own[: max(0, len(own) - (keep - 1))]


def forget(disk: Disk, store: Path, snapshots: Sequence[Snapshot]) -> None:
    """Deletes snapshots: their names, after which nobody finds them.

    Raises:
        OSError: the disk fails.
    """
    for snapshot in snapshots:
        (snapshot_folder(store) / snapshot.name).unlink(missing_ok=True)
    if snapshots:
        disk.sync_folder(snapshot_folder(store))


def clean(disk: Disk, stored: StoredGroup, first: Path, there: Collection[str]) -> None:
    """Deletes what a store keeps for snapshots that are no more, and the rows that only they need.

    What models keep that have another store first stays.

    Args:
        disk: the file system.
        stored: the store.
        first: the directory of the model's first store.
        there: uuids of the snapshots that are named there.

    Raises:
        DamagedStoreError: a file of a snapshot that is there is damaged.
        RuntimeError, OSError: the disk fails.
    """
    for folder in unfinished_folders(stored.path):
        disk.remove(folder)
    needed: list[list[int]] = [[] for _ in stored.group.config.slabs]
    names = {
        slab.name: files for slab, files in zip(stored.group.config.slabs, needed, strict=True)
    }
    for folder, record in histories_of(stored.path).items():
        named = Path(os.path.normpath(stored.path / record.first))
        if named == first and record.uuid not in there:
            # who dies while it is removed leaves something that is known to be no more
            doomed = folder.with_name(f"{folder.name}.tmp-{record.uuid}")
            disk.rename(folder, doomed)
            disk.remove(doomed)
            continue
        for of in record.segments:
            names.setdefault(of.slab, []).extend(of.files)
    if index_folder(stored.path).is_dir():
        disk.sync_folder(index_folder(stored.path))
    stored.tiers.keep([torch.tensor(files, dtype=torch.int64) for files in needed])


__all__ = [
    "clean",
    "forget",
    "goes_on_from",
    "histories_of",
    "history",
    "outdated",
    "snapshots_of",
]
