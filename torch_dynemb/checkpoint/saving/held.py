"""Keeps rows as they are for a save that goes on while training does, where they are not copied."""

from __future__ import annotations

from collections.abc import Sequence

from torch_dynemb.checkpoint.saving.source import GroupSource
from torch_dynemb.checkpoint.saving.stored_rows import StoredRows
from torch_dynemb.table.copy_on_write import CopyOnWriteRows


def hold_rows(groups: Sequence[GroupSource]) -> None:
    """Has rows that are not copied kept as they are now; whatever stops it, call release_rows().

    Args:
        groups: that are saved.

    Raises:
        RuntimeError: a disk is full, or fails, or there are no addresses.
    """
    for rows in _readers_of(groups):
        rows.hold()


def release_rows(groups: Sequence[GroupSource]) -> None:
    """Ends what :func:`hold_rows` has begun.

    Args:
        groups: that were saved.
    """
    for rows in _readers_of(groups):
        rows.release()


def _readers_of(groups: Sequence[GroupSource]) -> list[StoredRows | CopyOnWriteRows]:
    """Each once, though it reads the rows of several slabs of a group."""
    found = [slab.reader for group in groups for slab in group.slabs]
    return list(dict.fromkeys(reader for reader in found if reader is not None))


__all__ = ["hold_rows", "release_rows"]
