"""Snapshots of embeddings: checkpoints below their persistent path."""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from torch_dynemb import checkpoint
from torch_dynemb.argument_checks import text
from torch_dynemb.checkpoint import LoadReport

SNAPSHOTS = "snapshots"
RANK_FOLDER = re.compile(r"(\d+)-(\d+)")  # of a rank, and of how many
_TABLE = "table_"


def table_entry(number: int) -> str:
    """What a table of an embedding is called in a checkpoint."""
    return f"{_TABLE}{number}"


def table_number(owner: str, entry: str) -> int:
    """The number of a table of an embedding, by what it is called in a snapshot.

    Raises:
        ValueError: it is no table of an embedding.
    """
    number = entry.removeprefix(_TABLE)
    if not entry.startswith(_TABLE) or not number.isdecimal():
        raise ValueError(
            f"{owner}: the snapshot has a table {entry!r}, which is none of an embedding: read it "
            "with torch_dynemb.checkpoint.open"
        )
    return int(number)


def root_of(path: Path) -> Path:
    """The folder that has the snapshots of a path: of the folder of a rank, the one above."""
    return path.parent if RANK_FOLDER.fullmatch(path.name) else path


def snapshot_folder(owner: str, root: Path, name: object) -> Path:
    """Where a snapshot is.

    Args:
        owner: prefix of error messages.
        root: what :func:`root_of` gives.
        name: of the snapshot.

    Raises:
        TypeError, ValueError: ``name`` is no name of a folder.
    """
    chosen = text(f"{owner}: snapshot_name", name)
    if chosen in ("", ".", "..") or Path(chosen).name != chosen:
        raise ValueError(f"{owner}: snapshot_name is {chosen!r}, expected the name of a folder")
    return root / SNAPSHOTS / chosen


def save_embedding(embedding: nn.Module, root: Path, name: object) -> None:
    """Saves an embedding as a snapshot; see its ``save_snapshot``."""
    checkpoint.save(snapshot_folder("save_snapshot", root, name), embedding)


def load_embedding(
    embedding: nn.Module, root: Path, name: object, *, optimizer_state: bool
) -> LoadReport:
    """Loads a snapshot into an embedding; see its ``load_snapshot``."""
    folder = snapshot_folder("load_snapshot", root, name)
    return checkpoint.load(folder, embedding, optimizer_state=optimizer_state)


__all__ = [
    "RANK_FOLDER",
    "SNAPSHOTS",
    "load_embedding",
    "root_of",
    "save_embedding",
    "snapshot_folder",
    "table_entry",
    "table_number",
]
