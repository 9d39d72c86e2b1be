"""Paths of snapshots: beside the rows, in the directory of a group's store.

``snapshots/NAME`` is written last, in the directory of the model's first store. It makes the
snapshot exist. Every store has its own files of the snapshot in ``index/UUID``; those of a UUID
without a name were left by a dead save.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.files.locations import checked_path
from torch_dynemb.parts.table_parts import TablePart, groups_of, parts_of
from torch_dynemb.storage.tiers.ssd import KEPT_FOLDER
from torch_dynemb.storage.tiers.store_files import StoreFiles
from torch_dynemb.table.group import TableGroup

MODEL = "model"  # of index/UUID: a checkpoint of what lies outside stores
MANIFEST = "manifest.json"  # of index/UUID; written last
STATE = "state.safetensors"  # of index/UUID

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_UUID = re.compile(r"[0-9a-f]{32}")


class StoredGroup(NamedTuple):
    """A group with rows on a disk.

    Attributes:
        group: the tables.
        tiers: their cache and store.
        path: path of the store.
    """

    group: TableGroup
    tiers: StoreFiles
    path: Path


def checked_name(call: str, name: object) -> str:
    """Check the name of a snapshot. Return it.

    Raises:
        TypeError: it is not a text.
        ValueError: it is not a portable file name.
    """
    if not isinstance(name, str):
        raise TypeError(f"{call}: name is {described(name)}, expected a str")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{call}: name is {name!r}, expected 1 to 100 letters, digits, '.', '_' and '-', a "
            "letter or digit first"
        )
    return name


def stored_groups(call: str, parts: Sequence[TablePart]) -> list[StoredGroup]:
    """List the groups of some parts that have a store on a disk.

    Raises:
        RuntimeError: a group has a store of another kind, which snapshots do not support.
    """
    found = []
    for group in groups_of(parts):
        tiers = group.tables.tiers
        if tiers is None:
            continue
        if not isinstance(tiers, StoreFiles):
            raise RuntimeError(
                f"{call}: tables {group.names} have storage {type(group.config.storage).__name__}, "
                "which does not support snapshots: use torch_dynemb.checkpoint.save"
            )
        found.append(StoredGroup(group, tiers, Path(os.path.realpath(tiers.storage.path))))
    return found


def first_store(call: str, model: nn.Module | str | os.PathLike[str]) -> Path | None:
    """Return the directory with the names of snapshots; None if the model has no store on this
    rank.

    Args:
        call: prefix of errors.
        model: the model, or the directory.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(model, str | os.PathLike):
        return checked_path(call, model)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{call}: model is {described(model)}, expected a torch.nn.Module or the path of a "
            "store"
        )
    stores = stored_groups(call, parts_of(model))
    return stores[0].path if stores else None


# -- files ---------------------------------------------------------------------------------------


def snapshot_folder(store: Path) -> Path:
    """Return the folder with one file for each snapshot, in the first store of a model."""
    return store / "snapshots"


def snapshot_files(store: Path) -> list[Path]:
    """List the files of all snapshots, in no order."""
    folder = snapshot_folder(store)
    return [p for p in folder.iterdir() if _NAME.fullmatch(p.name)] if folder.is_dir() else []


def index_folder(store: Path) -> Path:
    """Return the folder in which a store keeps the files of snapshots."""
    return store / KEPT_FOLDER


def index_folders(store: Path) -> list[Path]:
    """List the folders that a store keeps for snapshots, also abandoned ones."""
    return [of for of in index_folder(store).glob("*") if _UUID.fullmatch(of.name)]


def segment_file(store: Path, slab: str, number: int) -> Path:
    """Return the path of a file of rows.

    Args:
        store: directory of the store.
        slab: name of the slab.
        number: number of the file.
    """
    return store / "rows" / slab / f"{number:08x}"


__all__ = [
    "MANIFEST",
    "MODEL",
    "STATE",
    "StoredGroup",
    "checked_name",
    "first_store",
    "index_folder",
    "index_folders",
    "segment_file",
    "snapshot_files",
    "snapshot_folder",
    "stored_groups",
]
