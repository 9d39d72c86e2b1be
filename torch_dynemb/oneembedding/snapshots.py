"""Snapshots of embeddings: checkpoints below their persistent path."""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from torch_dynemb import checkpoint
from torch_dynemb.argument_checks import text
from torch_dynemb.checkpoint import LoadReport

SNAPSHOTS = "snapshots"
RANK_FOLDER = re.compile(r"(\d+)-(\d+)")  # folder of a rank: rank and number of ranks
_TABLE = "table_"


def table_entry(number: int) -> str:
    """Return the name of a table of an embedding in a checkpoint."""
    return f"{_TABLE}{number}"


def number_in_snapshot(owner: str, entry: str) -> int:
    """Return the table number for a name in a snapshot.

    Raises:
        ValueError: it does not name a table of an embedding.
    """
    number = entry.removeprefix(_TABLE)
    if not entry.startswith(_TABLE) or not number.isdecimal():
        raise ValueError(
            f"{owner}: the snapshot has a table {entry!r}, which is not one of an embedding: "
            "read it with torch_dynemb.checkpoint.open"
        )
    return int(number)


def root_of(path: Path) -> Path:
    """Return the folder that has the snapshots of a path; of a rank's folder it is the parent."""
    return path.parent if RANK_FOLDER.fullmatch(path.name) else path


def folder_of_snapshot(owner: str, root: Path, name: object) -> Path:
    """Return the folder of a snapshot.

    Args:
        owner: prefix of error messages.
        root: result of :func:`root_of`.
        name: of the snapshot.

    Raises:
        TypeError, ValueError: ``name`` is not a valid folder name.
    """
    chosen = text(f"{owner}: snapshot_name", name)
    if chosen in ("", ".", "..") or Path(chosen).name != chosen:
        raise ValueError(f"{owner}: snapshot_name is {chosen!r}, expected the name of a folder")
    return root / SNAPSHOTS / chosen


def save_embedding(embedding: nn.Module, root: Path, name: object) -> None:
    """Save an embedding as a snapshot; see its ``save_snapshot``."""
    checkpoint.save(folder_of_snapshot("save_snapshot", root, name), embedding)


def load_embedding(
    embedding: nn.Module, root: Path, name: object, *, optimizer_state: bool
) -> LoadReport:
    """Load a snapshot into an embedding; see its ``load_snapshot``."""
    folder = folder_of_snapshot("load_snapshot", root, name)
    return checkpoint.load(folder, embedding, optimizer_state=optimizer_state)


__all__ = [
    "RANK_FOLDER",
    "SNAPSHOTS",
    "folder_of_snapshot",
    "load_embedding",
    "number_in_snapshot",
    "root_of",
    "save_embedding",
    "table_entry",
]
